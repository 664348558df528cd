"""The command line: words become overrides and parameters, and every failure is one sentence."""

import datetime
import errno
import importlib
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from prefect import Flow as PrefectFlow
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import ParameterTypeError
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_RESULTS_DEFAULT_SERIALIZER,
    PREFECT_RESULTS_PERSIST_BY_DEFAULT,
    temporary_settings,
)
from prefect.tasks import MaterializingTask
from pydantic import BaseModel, ValidationError

from flows.runtime import cli
from flows.runtime.cli import check_types, parse, sentence
from flows.runtime.console import PrivateFlow, task_of
from flows.runtime.flow import explaining
from pipeline.config.files import ROOT
from pipeline.errors import AccessError, ConfigError
from pipeline.jobs.console import Step
from tests.homes import open_smoke


def ingest(config: str, overrides: Mapping[str, Any] | None = None, day: Any = None, force: bool = False) -> None: ...


INGEST = ["day", "force"]
"""The parameters of that flow."""


@pytest.mark.parametrize(
    ("word", "overrides", "parameters"),
    [
        ("training.epochs=2", {"training.epochs": 2}, {}),
        ("seed=3", {"seed": 3}, {}),
        ("home=/data/runs", {"home": "/data/runs"}, {}),
        ("force=true", {}, {"force": True}),
        ("day=2024-01-31", {}, {"day": datetime.date(2024, 1, 31)}),
        ("training.max_steps=null", {"training.max_steps": None}, {}),
        ("training.max_steps=", {"training.max_steps": None}, {}),
        ("evaluation.slices=[a, b]", {"evaluation.slices": ["a", "b"]}, {}),
        ("filter=country = 'DE' and age >= 18", {"filter": "country = 'DE' and age >= 18"}, {}),
        ("source.path=*.csv", {"source.path": "*.csv"}, {}),  # not YAML: taken as it is
        ("split.days.train=[2024-01-01..2024-01-05]", {"split.days.train": ["2024-01-01..2024-01-05"]}, {}),
        ("preprocessing.on=off", {"preprocessing.on": "off"}, {}),
    ],
)
def test_words(word: str, overrides: dict[str, Any], parameters: dict[str, Any]) -> None:
    assert parse([word], INGEST) == (overrides, parameters)


def test_the_last_of_equal_words_counts() -> None:
    assert parse(["seed=3", "seed=4", "force=true"], INGEST) == ({"seed": 4}, {"force": True})


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("force", "argument 'force': expected key=value, got no '='. Write it like training.epochs=2."),
        *(
            (
                f"{key}=1",
                f"argument '{key}': expected a parameter of this flow (day, force) or a config key, got neither. "
                "Write config keys with their section, like training.epochs=2.",
            )
            for key in ("xyzzy", "overrides", "")
        ),
        (
            "dya=1",
            "argument 'dya': expected a parameter of this flow (day, force) or a config key, got neither. "
            "Did you mean day?",
        ),
        (
            "epochs=1",
            "argument 'epochs': expected a parameter of this flow (day, force) or a config key, got neither. "
            "Did you mean training.epochs?",
        ),
    ],
)
def test_invalid_words_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse([word], INGEST)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("force=maybe", "argument 'force': expected a valid boolean, unable to interpret input, got 'maybe'. Correct the value."),
        ("force=", "argument 'force': expected a valid boolean, got None. Correct the value."),
    ],
)  # fmt: skip
def test_a_parameter_of_another_type_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_types(parse([word], INGEST)[1], ingest)
    assert str(error.value) == said


@pytest.mark.parametrize(("words", "terminal"), [([], True), (["--json"], True), ([], False)])
def test_a_terminal_gets_a_summary_and_a_pipe_one_line_of_json(monkeypatch, capsys, words, terminal) -> None:
    result = {"status": "ok", "days_written": 3, "held": [], "path": "a"}
    monkeypatch.setattr(cli, "run", lambda *_: result)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main("ingest", ["configs/smoke.yaml", *words]) == 0
    signal.signal(signal.SIGTERM, before)
    shown = capsys.readouterr().out.splitlines()
    if terminal and not words:
        assert shown == ["ok: 3 days written.", "days_written: 3, path: a", "--json prints all of it"]
    else:
        assert json.loads(shown[-1]) == result


def test_a_home_that_the_environment_overrules_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home in the config is a default, and DLRM_HOME overrules it silently. One that is asked for is not."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"argument 'home': expected no DLRM_HOME, .*, got DLRM_HOME={tmp_path}"):
        cli.run("ingest", ["configs/smoke.yaml", "home=/data/runs"])


def test_a_flow_without_parameters_says_so() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["xyzzy=1"], [])
    assert str(error.value) == (
        "argument 'xyzzy': expected a parameter of this flow (none) or a config key, got neither. "
        "Write config keys with their section, like training.epochs=2."
    )


class Parameters(BaseModel):
    force: bool = False


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as error:
        Parameters.model_validate({"force": "perhaps"})
    return error.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("age", "a number", "text", "Convert it."), "age: expected a number, got text. Convert it."),
        (
            validation_error(),
            "parameter 'force': Input should be a valid boolean, unable to interpret input, got 'perhaps'.",
        ),
        (ValueError("first line\nsecond line"), "ValueError: first line (--debug shows more)"),
        (RuntimeError(), "RuntimeError: no message (--debug shows more)"),
        (KeyError("age"), "KeyError: 'age' (--debug shows more)"),
        (
            ParameterTypeError.from_validation_error(validation_error()),
            "ParameterTypeError: Flow run received invalid parameters: "
            "force: Input should be a valid boolean, unable to interpret input (--debug shows more)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line(error: Exception, said: str) -> None:
    assert sentence(error) == said


def test_a_full_disk_and_a_missing_permission_are_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk is the one with the least space of those of the file, the home and temporary files."""
    (tmp_path / "small").mkdir()
    space = {tmp_path / "small": SimpleNamespace(free=3 * 2**20, total=5000 * 2**20)}
    plenty = SimpleNamespace(free=2**40, total=2**41)
    monkeypatch.setattr(cli.shutil, "disk_usage", lambda path: space.get(Path(path), plenty))
    error = OSError(errno.ENOSPC, "Error writing bytes to file", str(tmp_path / "small" / "file"))
    assert sentence(error) == (
        f"the disk of '{tmp_path / 'small'}' is full: 3 MiB of 5,000 are free. Free some, for which flows.clean "
        "lists what can go, or set DLRM_HOME or TMPDIR to another disk."
    )
    assert "is full" in sentence(OSError("IOError: No space left on device"))
    assert sentence(PermissionError(errno.EACCES, "Permission denied", "/home/a/locks")) == (
        "no permission to use '/home/a/locks'. Let its owner give it to you, or set DLRM_HOME to a folder of your own."
    )


class Flow:
    """The parts of a Prefect flow that the command line uses."""

    name = "end-to-end"

    def __init__(self, result: dict[str, Any] | Exception) -> None:
        self.result, self.got = result, SimpleNamespace()

    @staticmethod
    def fn(config: Any, overrides: Any = None, force: bool = False) -> None: ...

    def __call__(self, config: Any, **parameters: Any) -> dict[str, Any]:
        self.got = SimpleNamespace(config=config, parameters=parameters)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def ended(flow: Flow, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, dict[str, Any], str]:
    code = cli.main(flow, words)
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


@pytest.fixture(autouse=True)
def _leave_the_process_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(cli, "hide_tracebacks", lambda: None)
    names = {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/prefect.db"}
    address = "http://127.0.0.1:9/api"
    nothing = SimpleNamespace(wait=lambda: None, stop=lambda: None, settings=names, address=address, secret="a:b")
    monkeypatch.setattr(cli, "TemporaryServer", lambda folder, process: SimpleNamespace(**vars(nothing), folder=folder))
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("skipped", 0)])
def test_the_last_line_is_the_result(status: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow({"status": status, "day": datetime.date(2024, 1, 1)})
    made = ended(flow, [str(ROOT / "configs/smoke.yaml"), "seed=5", "force=true"], capsys)
    assert made == (code, {"status": status, "day": "2024-01-01"}, "")
    assert (flow.got.config.seed, flow.got.parameters) == (5, {"overrides": {"seed": 5}, "force": True})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "command line: expected a config file first, got nothing. "
            "Usage: python -m flows.end_to_end CONFIG.yaml [key=value ...] [--debug]",
        ),
        (
            ["seed=3"],
            "command line: expected a config file first, got seed=3. "
            "Usage: python -m flows.end_to_end CONFIG.yaml [key=value ...] [--debug]",
        ),
        (
            ["configs/smoke.yaml", "training.epoch=2"],
            "configs/smoke.yaml, key 'training.epoch': expected a known key, got 'epoch'. Did you mean 'epochs'?",
        ),
        (["configs/smoke.yaml"], "OSError: no space (--debug shows more)"),
    ],
)
def test_a_failure_is_one_sentence_and_exit_code_1(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ended(Flow(OSError("no space")), words, capsys)
    assert made == (1, {"status": "failed", "error": said}, f"error: {said}\n")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, err = ended(Flow(OSError("no space")), ["--debug", "configs/smoke.yaml"], capsys)
    assert (code, result["status"]) == (1, "failed")
    assert "Traceback" in err


@pytest.mark.parametrize("home", ["file", "file/below"])
def test_a_home_that_cannot_be_written_to_is_refused(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code, result, _ = ended(Flow({"status": "ok"}), ["configs/smoke.yaml"], capsys)
    assert (code, result["error"]) == (
        1,
        f"home '{tmp_path / home}': expected a folder, got '{tmp_path / 'file'}'. Set DLRM_HOME, or home, to another folder.",
    )


def test_prefect_reads_no_stored_results() -> None:
    """A stored result names its own serializer, even pickle. So none is written and none is read."""
    modules = [importlib.import_module(f"flows.{path.stem}") for path in sorted((ROOT / "flows").glob("*.py"))]
    flows = [value for module in modules for value in vars(module).values() if isinstance(value, PrefectFlow)]
    workspace = open_smoke()
    tasks = [task_of(Step("name", makes), lambda workspace: None, workspace) for makes in (None, "table", "model")]
    assert {PrivateFlow, Task, MaterializingTask} == {type(value) for value in (*flows, *tasks)}
    for value in (*flows, *tasks):
        assert not value.persist_result, value.name
        assert value.result_serializer in (None, "json"), value.name
        if isinstance(value, Task):
            assert value.cache_policy == NO_CACHE, value.name
            assert value.cache_key_fn is None, value.name
    assert (PREFECT_RESULTS_PERSIST_BY_DEFAULT.value(), PREFECT_RESULTS_DEFAULT_SERIALIZER.value()) == (False, "json")


def test_an_error_of_mlflow_is_one_sentence_wherever_a_command_meets_it():
    """Deployed runs end with it, too. What was finished before it stays known; errors of others pass."""
    error = MlflowException("API request to endpoint /api/2.0/mlflow/runs/get failed with error code 403 != 200.")
    error.finished = [{"status": "failed"}]  # type: ignore[attr-defined]

    def ask(given: Exception) -> None:
        raise given

    with pytest.raises(AccessError, match="expected permission for runs/get, got a refusal") as caught:
        explaining(ask)(error)
    assert caught.value.finished == error.finished  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        explaining(ask)(KeyError("other"))
