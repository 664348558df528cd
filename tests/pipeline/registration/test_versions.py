"""What is fetched from the registry is what was registered, or it is refused."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from mlflow.models import Model
from mlflow.pyfunc import PythonModelContext

from pipeline.errors import AccessError, RegistryError, TrackingError
from pipeline.inference import files
from pipeline.inference.files import EXAMPLE, FILES, MODEL, PLAN, WEIGHTS, check_files, hash_files
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.scorer import Scorer
from pipeline.registration.tracking import RESULT, Tracker, local_path, reporting_unreachable
from pipeline.registration.versions import (
    SIZE,
    download_packed,
    download_part,
    find_registered,
    is_intact,
)
from storage.artifacts import link_or_copy

CONTENTS = {MODEL: b"{}", PLAN: b"[]", WEIGHTS: bytes(range(256))}
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda model: (model / WEIGHTS).write_bytes(b"\x01" + CONTENTS[WEIGHTS][1:]), WEIGHTS),
    "a cut file": (lambda model: (model / PLAN).write_bytes(b"["), PLAN),
    "a lost file": (lambda model: (model / MODEL).unlink(), MODEL),
}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The packed model of a version, where the registry keeps it."""
    folder = tmp_path / "stored" / "artifacts" / "model"
    folder.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def registry(tmp_path: Path, packed: Path) -> Callable[[dict[str, str]], tuple[Tracker, int]]:
    """Registers the packed model with tags, and returns registry and version."""
    tracker = Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, "versions")
    tracker.client.create_registered_model("m")

    def register(tags: dict[str, str]) -> tuple[Tracker, int]:
        made = tracker.client.create_model_version("m", (tmp_path / "stored").as_uri(), tags=tags)
        return tracker, int(made.version)

    return register


def test_a_whole_version_is_fetched(registry, packed, tmp_path):
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    folder = download_packed(tracker, "m", version, tmp_path / "fetched")
    assert {name: (folder / name).read_bytes() for name in CONTENTS} == CONTENTS


def test_a_request_whose_answer_was_lost_makes_no_second_version(tmp_path):
    """Versions of the run with other files, or with an alias, are somebody's, and stay."""
    tracker = Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, "versions")
    run_id = tracker.start("run", {}, {}, None)
    for name in ("m", "other"):
        tracker.client.create_registered_model(name)
    for name, source in (("m", "old"), ("m", "new"), ("m", "new"), ("other", "new"), ("m", "new")):
        tracker.client.create_model_version(name, (tmp_path / source).as_uri(), run_id)
    tracker.client.set_registered_model_alias("m", "champion", "2")
    assert find_registered(tracker, "m", "nothing") is None
    for _ in range(2):
        found = find_registered(tracker, "m", run_id)
        assert found is not None
        assert found.version == 4
    assert sorted(int(one.version) for one in tracker.client.search_model_versions("name = 'm'")) == [1, 2, 4]
    assert len(tracker.client.search_model_versions("name = 'other'")) == 1


def test_who_may_read_a_model_needs_no_experiment(tmp_path, monkeypatch):
    """Serving asks for the model and its run alone."""
    made = []
    monkeypatch.setattr(Tracker, "_experiment", lambda *given: made.append(given) or "1")
    tracker = Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, None)
    assert tracker.client.search_registered_models() == []
    assert made == []


def test_a_version_of_this_machine_is_linked_and_outlives_its_removal(registry, packed, tmp_path):
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    folder = download_packed(tracker, "m", version, tmp_path / "fetched")
    assert (folder / WEIGHTS).samefile(packed / WEIGHTS)
    shutil.rmtree(tmp_path / "stored")
    assert (folder / WEIGHTS).read_bytes() == CONTENTS[WEIGHTS]


def test_a_file_is_read_once_under_all_its_names_until_it_changes(packed, tmp_path, monkeypatch):
    read, plain = list[str](), files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path.name) or plain(path))
    settle(packed)
    other = tmp_path / "other"
    other.mkdir()
    for name in CONTENTS:
        link_or_copy(packed / name, other / name)
    hashes = hash_files(packed)
    assert hash_files(other) == hashes
    assert read == [MODEL, PLAN, WEIGHTS]
    for _ in range(2):  # of the same size, and read each time while its time may stay the same
        HARMS["a flipped bit"][0](packed)
        with pytest.raises(RegistryError, match="another weights"):
            check_files("model", other, hashes)
    assert read == [MODEL, PLAN, WEIGHTS, WEIGHTS, WEIGHTS]


def settle(packed: Path) -> None:
    """Makes the files as old as those of yesterday's training."""
    for name in CONTENTS:
        os.utime(packed / name, (time.time() - 86_400,) * 2)


@pytest.mark.parametrize("harm", [None, *HARMS])
def test_a_version_is_intact_if_its_files_are_those_of_the_registration(registry, packed, monkeypatch, harm):
    """Weights that nobody has written since are not read: a training with nothing to do would read them each night."""
    settle(packed)
    tracker, version = registry({FILES: json.dumps(hash_files(packed)), SIZE: f"{len(CONTENTS[WEIGHTS])}"})
    run_id = tracker.start("r", {}, {}, None)
    tracker.log_json(run_id, {"status": "ok"}, RESULT)
    read, plain = list[str](), files._hash
    monkeypatch.setattr(files, "_hash", lambda path: read.append(path.name) or plain(path))
    if harm is not None:
        HARMS[harm][0](packed)
    assert is_intact(tracker, "m", version, run_id) == (harm is None)
    assert (WEIGHTS in read) == (harm == "a flipped bit")


def test_the_code_of_a_version_is_not_fetched(registry, packed, tmp_path):
    (tmp_path / "stored" / "code").mkdir()
    (tmp_path / "stored" / "code" / "module.py").write_text("")
    (tmp_path / "stored" / EXAMPLE).write_text("{}")
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    download_packed(tracker, "m", version, tmp_path / "fetched")
    download_part(tracker, "m", version, EXAMPLE, tmp_path / "fetched")
    download_part(tracker, "m", version, "none.json", tmp_path / "fetched")
    found = {path.name for path in (tmp_path / "fetched").rglob("*") if path.is_file()}
    assert found - {"registered_model_meta"} == {*CONTENTS, EXAMPLE}


def test_files_of_a_moved_home_are_told_by_their_old_folder(registry, packed, tmp_path):
    """They would be damaged ones, and MLflow would say that it failed to download."""
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    run_id = tracker.start("r", {}, {}, None)
    with pytest.raises(RegistryError, match=rf"^MLflow run '{run_id}': expected one with {RESULT}, got none"):
        tracker.read_json(run_id, RESULT)  # nothing was logged, and so there is no folder
    tracker.log_json(run_id, {"status": "ok"}, RESULT)
    tracker.client.set_terminated(run_id)
    artifacts = local_path(tracker.client.get_run(run_id).info.artifact_uri)
    (tmp_path / "stored").rename(tmp_path / "moved")
    artifacts.rename(tmp_path / "moved too")
    told = r"expected those in '{}', as MLflow has it, got no such folder\. If their folder was moved, "
    with pytest.raises(RegistryError, match="^files of model 'm', version 1: " + told.format(tmp_path / "stored")):
        download_packed(tracker, "m", version, tmp_path / "fetched")
    with pytest.raises(RegistryError, match=f"^files of MLflow run '{run_id}': " + told.format(artifacts)):
        tracker.read_json(run_id, RESULT)
    assert not is_intact(tracker, "m", version, run_id)


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_version_is_refused(registry, packed, tmp_path, harm):
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    change, name = HARMS[harm]
    change(packed)
    with pytest.raises(RegistryError) as caught:
        download_packed(tracker, "m", version, tmp_path / "fetched")
    assert str(caught.value) == (
        f"model 'm', version 1: expected the files that were registered, got {'no' if harm == 'a lost file' else 'another'} {name}. "
        "Restore them from a copy, or promote another version."
    )


@pytest.mark.parametrize(
    "tags", [{}, {FILES: "{"}, {FILES: "null"}, {FILES: "[" * 4_000}, {FILES: '{"plan.json": "0"}'}]
)
def test_a_version_without_hashes_is_refused(registry, tmp_path, tags):
    tracker, version = registry(tags)
    with pytest.raises(RegistryError) as caught:
        download_packed(tracker, "m", version, tmp_path / "fetched")
    assert str(caught.value) == (
        "model 'm', version 1: expected hashes of its files in the tag files_sha256, got none. "
        "Train another: python -m flows.train CONFIG force=true."
    )


def test_the_served_model_compares_its_files_before_it_loads_them(packed):
    Model(metadata={FILES: hash_files(packed)}).save(str(packed.parents[1] / "MLmodel"))
    HARMS["a flipped bit"][0](packed)
    context = PythonModelContext({"model": str(packed)}, {})
    with pytest.raises(RegistryError, match=r"served model: expected the files that were registered, got another wei"):
        Scorer().load_context(context)


PLACE = "/mlflow-artifacts/artifacts"


class Store(BaseHTTPRequestHandler):
    """A store of artifacts that lists a version's files, and fails when one of them is fetched."""

    status = 503

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        below = {"": ("artifacts", True), "artifacts": ("model", True), "artifacts/model": (WEIGHTS, False)}
        body = b"{}"
        if asked.path == PLACE:
            name, is_folder = below[parse_qs(asked.query).get("path", [""])[0]]
            body = json.dumps({"files": [{"path": name, "is_dir": is_folder, "file_size": 1}]}).encode()
        self.send_response(200 if b"files" in body else self.status)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("status", "raised"), [(503, TrackingError), (500, TrackingError), (403, AccessError), (404, None)]
)
def test_a_store_that_fails_says_nothing_about_a_version(tmp_path, packed, monkeypatch, status, raised):
    """Otherwise the version would count as damaged, and be trained again."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(Store, "status", status)
    tracker = Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, "versions")
    tracker.client.create_registered_model("m")
    run_id = tracker.start("r", {}, {}, None)
    tracker.log_json(run_id, {"status": "ok"}, RESULT)
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = f"http://127.0.0.1:{server.server_port}{PLACE}"
        tags = {FILES: json.dumps(hash_files(packed))}
        version = int(tracker.client.create_model_version("m", source, tags=tags).version)
        with nullcontext() if raised is None else pytest.raises(raised), reporting_unreachable("Wait."):
            assert not is_intact(tracker, "m", version, run_id)
        server.shutdown()
