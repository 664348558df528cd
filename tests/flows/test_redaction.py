"""Credentials of a config reach neither Prefect's database nor logs, errors, MLflow or any other file of a home."""

import json
import logging
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.hashing import file_hash

from flows.end_to_end import end_to_end
from flows.ingest import ingest
from flows.runtime import cli, console, redaction
from flows.runtime.console import PrivateFlow
from pipeline.config import RunConfig, load
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError
from pipeline.jobs.outcome import run_address
from tests.homes import CONFIG

SECRETS = ("hunter2catalog", "hunter2key", "hunter2mlflow")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "known", set())


def overrides(home: Path) -> dict[str, Any]:
    """A catalog and an MLflow database that work, with credentials that nobody checks."""
    (home / "warehouse").mkdir(parents=True, exist_ok=True)
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{home}/warehouse/catalog.db?password={SECRETS[0]}",
        "warehouse": f"file://{home}/warehouse",
        "s3.secret-access-key": SECRETS[1],
    }
    return {"warehouse.catalog": catalog, "registration.tracking_uri": f"sqlite:///{home}/mlflow.db?token={SECRETS[2]}"}


def holders(home: Path) -> dict[str, list[str]]:
    """Returns the files with a secret in their name or bytes -> the secrets."""
    found = {}
    for path in home.rglob("*"):
        content = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        if secrets := [secret for secret in SECRETS if secret.encode() in content]:
            found[str(path.relative_to(home))] = secrets
    return found


@pytest.mark.slow
def test_a_real_run_leaves_no_credentials_behind(tmp_path, monkeypatch, capfd):
    """Ingest, training, registration and subflows, on the command's own server."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    words = [f"{key}={json.dumps(value)}" for key, value in overrides(tmp_path).items()]
    light = ["training.world_size=1", "training.threads_per_rank=1", "preprocessing.executor=inline"]
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code = cli.main(end_to_end, [CONFIG, *words, *light])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert not [secret for secret in SECRETS if secret in out + err]
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        rows = database.execute("SELECT name, parameters FROM flow_run ORDER BY created").fetchall()
    assert [name.split()[0] for name, _ in rows] == ["end-to-end", "ingest", "train"]
    for _, parameters in rows:
        shown = json.loads(parameters)["config"]
        assert set(shown["warehouse"]["catalog"].values()) == {redaction.MASK}
        assert shown["registration"]["tracking_uri"] == redaction.MASK
    left = holders(tmp_path)
    assert {Path(name).name for name in left} <= {"job.json", "spec.json"}
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in left} <= {0o600}


def test_prefect_stores_masked_parameters():
    config = load(CONFIG, overrides(Path("/nowhere")))
    shown = ingest.serialize_parameters({"config": config, "overrides": overrides(Path("/nowhere")), "day": None})
    assert not [secret for secret in SECRETS if secret in json.dumps(shown)]
    assert shown["config"]["source"] == config.model_dump(mode="json")["source"]
    assert shown["overrides"]["registration.tracking_uri"] == redaction.MASK


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"warehouse": {"catalog": {"uri": "x"}, "codec": "zstd"}}, {"warehouse": {"catalog": {"uri": "*"}, "codec": "zstd"}}),
        ({"warehouse.catalog.a.b": "x"}, {"warehouse.catalog.a.b": "*"}),
        ({"warehouse.catalog": "x"}, {"warehouse.catalog": "*"}),
        ({"candidates": [{"overrides": {"registration.tracking_uri": "x"}}]}, {"candidates": [{"overrides": {"registration.tracking_uri": "*"}}]}),
        ({"registration": {"tracking_uri": None}}, {"registration": {"tracking_uri": None}}),
        ("configs/smoke.yaml", "configs/smoke.yaml"),
    ],
)  # fmt: skip
def test_what_is_masked(given, shown):
    assert redaction.mask({"config": given}) == json.loads(
        json.dumps({"config": shown}).replace('"*"', f'"{redaction.MASK}"')
    )


class DriverError(Exception):
    """An error with a text of its own, as drivers have."""

    def __str__(self) -> str:
        return f"cannot log in with {SECRETS[1]}"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("catalog", "an answer", f"postgresql://me:{SECRETS[0]}@host/db", f"Not {SECRETS[1]}."),
        ValueError(f"cannot reach mysql://me:{SECRETS[0]}@host"),
        DriverError(),
    ],
)
def test_an_error_shows_no_credentials_in_the_database(prefect, tmp_path, monkeypatch, error, caplog):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    values = {"uri": f"postgresql://me:{SECRETS[0]}@host/db", "s3.secret-access-key": SECRETS[1]}

    def fail(config: RunConfig) -> None:
        from flows.runtime.flow import open_workspace

        log = open_workspace(config).console.log
        log.info("it opens %s", values["uri"])
        raise error

    failing = PrivateFlow(fail, name="fail")
    state = failing(load(CONFIG, {"warehouse.catalog": values}), return_state=True)
    logging.getLogger("prefect.flow_runs")
    assert state.is_failed()
    assert redaction.MASK in state.message
    assert "it opens postgresql://me:********@host/db" in caplog.text
    assert not [secret for secret in SECRETS if secret in state.message + caplog.text]


@pytest.mark.parametrize(
    ("properties", "tracking"),
    [
        ({"adls.connection-string": f"AccountName=a;{SECRETS[0]}"}, ""),
        ({"header.Authorization": f"Bearer {SECRETS[0]}"}, ""),
        ({"uri": f"https://{SECRETS[0]}@catalog.example/api"}, ""),
        ({"uri": "https://catalog.example/api"}, f"https://me:{SECRETS[0]}@mlflow.example"),
    ],
)
def test_each_kind_of_credential_is_known(monkeypatch, properties, tracking):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    redaction.remember(load(CONFIG, {"warehouse.catalog": properties}))
    assert SECRETS[0] not in redaction.hide(f"{properties} {tracking}")
    assert redaction.hide("https://catalog.example/api") == "https://catalog.example/api"


def test_pages_show_no_credentials(monkeypatch):
    shown: list[Any] = []
    for kind in ("markdown", "table", "link"):
        monkeypatch.setattr(console, f"create_{kind}_artifact", lambda *args, **_: shown.extend(args))
    redaction.known.add(SECRETS[0])
    page = console.PrefectConsole()
    page.show_text("report", "a", f"see {SECRETS[0]}")
    page.show_table("rows", "a", [{"place": f"//{SECRETS[0]}@host"}], "rows")
    page.show_link("mlflow", "a", f"https://me:{SECRETS[0]}@host", SECRETS[0], "run")
    assert len(shown) == 4
    assert SECRETS[0] not in str(shown)


def test_the_address_of_a_run_holds_no_password(monkeypatch, tmp_path):
    monkeypatch.delenv("DLRM_MLFLOW_UI", raising=False)
    tracker: Any = SimpleNamespace(uri=f"https://me:{SECRETS[2]}@mlflow.example", experiment_id="7")
    workspace: Any = SimpleNamespace(tracking=tracker, home=tmp_path)
    assert run_address(workspace, "abc") == "https://mlflow.example/#/experiments/7/runs/abc"


def test_links_lead_to_where_the_ui_of_the_home_shows_mlflow(monkeypatch, tmp_path):
    monkeypatch.delenv("DLRM_MLFLOW_UI", raising=False)
    tracker: Any = SimpleNamespace(uri="sqlite:///mlflow.db", experiment_id="7")
    workspace: Any = SimpleNamespace(tracking=tracker, home=tmp_path)
    assert run_address(workspace, "abc").startswith("http://127.0.0.1:5000/#/")
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "mlflow_address").write_text("http://127.0.0.1:5310\n")
    assert run_address(workspace, "abc") == "http://127.0.0.1:5310/#/experiments/7/runs/abc"


def test_a_flow_with_other_options_is_private_and_versioned_by_its_own_file():
    other = ingest.with_options(retries=2)
    assert (type(other), other.retries, other.name) == (PrivateFlow, 2, "ingest")
    assert {ingest.version, other.version} == {file_hash(str(ROOT / "flows" / "ingest.py"))}
    shown = other.serialize_parameters({"overrides": overrides(Path("/nowhere"))})
    assert shown["overrides"]["registration.tracking_uri"] == redaction.MASK


def test_a_wrong_credential_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        load(CONFIG, {"warehouse.catalog.password": 12345678})
    assert "warehouse.catalog.password" in str(caught.value)
    assert "got another value" in str(caught.value)
