"""What is fetched from the registry is what was registered, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.pyfunc import PythonModelContext

from pipeline.errors import RegistryError
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.scorer import Scorer
from pipeline.registration.tracking import Tracker
from pipeline.registration.versions import FILES, HASHES, MODEL, PLAN, WEIGHTS, download_packed, hash_files

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


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_version_is_refused(registry, packed, tmp_path, harm):
    tracker, version = registry({FILES: json.dumps(hash_files(packed))})
    change, name = HARMS[harm]
    change(packed)
    with pytest.raises(RegistryError) as caught:
        download_packed(tracker, "m", version, tmp_path / "fetched")
    assert str(caught.value) == (
        f"model 'm', version 1: expected the files that were registered, got another {name}. "
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
    hashes = packed.parent / HASHES
    hashes.write_text(json.dumps(hash_files(packed)))
    HARMS["a flipped bit"][0](packed)
    context = PythonModelContext({"model": str(packed), "hashes": str(hashes)}, {})
    with pytest.raises(RegistryError, match=r"served model: expected the files that were registered, got another wei"):
        Scorer().load_context(context)
