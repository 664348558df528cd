"""Commands in errors, log lines and messages name the config's path."""

import json
import logging
import sys

import pytest

from flows.runtime import cli, placeholders
from flows.runtime.flow import notify_failure, notify_result
from pipeline.config import load
from pipeline.errors import RegistryError
from tests.homes import CONFIG


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setattr(placeholders, "known", [])
    placeholders.note_path(CONFIG)
    placeholders.note_path(load(CONFIG))  # a flow inside another one gets the config itself
    assert placeholders.known == [CONFIG]


def test_an_error_names_the_path():
    error = RegistryError("model 'a'", "a champion", "none", "Train one: python -m flows.train CONFIG, or dlrm sweep CONFIG.")  # fmt: skip
    placeholders.complete_error(error)
    assert str(error).endswith(f"Train one: python -m flows.train {CONFIG}, or dlrm sweep {CONFIG}.")
    assert error.args[3] == error.remedy
    assert placeholders.complete("usage: CONFIG.yaml, python -m flows.x CONFIG.yaml") == (
        "usage: CONFIG.yaml, python -m flows.x CONFIG.yaml"
    )


def test_a_log_line_names_the_path(caplog):
    placeholders.complete_logs("dlrm.placeholders")
    log = logging.getLogger("dlrm.placeholders")
    log.warning("%s; see %s", "a, 100 %", "python -m flows.report CONFIG run=3")
    assert caplog.messages == [f"a, 100 %; see python -m flows.report {CONFIG} run=3"]


def test_a_message_to_people_names_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read())"
    told = tmp_path / "told"
    (tmp_path / "notify.yaml").write_text(json.dumps({"command": [sys.executable, "-c", script, str(told)]}))
    notify_result("ingest", {"config": load(CONFIG)}, {"status": "ok", "held": ["2025-01-06"]})
    assert f"python -m flows.ingest {CONFIG} day=2025-01-06 force=true" in told.read_text()
    error = ValueError("no")
    vars(error)["finished"] = [{"status": "failed", "held": ["2025-01-07"]}]
    notify_failure("train", {"config": load(CONFIG)}, error)
    assert f"python -m flows.train {CONFIG}\n" in told.read_text(), "not the name of the config"
    assert f"python -m flows.ingest {CONFIG} day=2025-01-07 force=true" in told.read_text(), "what was done before"


def test_the_last_line_names_the_path(capsys, monkeypatch):
    def refuse(flow, words, *rest):
        raise RegistryError("model 'a'", "a champion", "none", "Train one: python -m flows.train CONFIG.")

    monkeypatch.setattr(cli, "run", refuse)
    assert cli.main("train", [CONFIG]) == 1
    assert f"python -m flows.train {CONFIG}." in json.loads(capsys.readouterr().out)["error"]
