"""How a run ends: its name and state say what came of it, and an interrupt is a cancellation."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run
from prefect.states import Cancelling

from flows.runtime import ending
from flows.runtime.console import PrefectConsole, PrivateFlow
from pipeline.config import load
from pipeline.errors import StorageError
from pipeline.jobs.console import step

runs: list[str] = []


def flow(function: Callable[..., Any], name: str = "train") -> PrivateFlow:
    """A flow that notes the ids of its runs."""

    def noting(
        config: Any = "configs/smoke.yaml", overrides: Any = None, day: str | None = None, tries: int = 3
    ) -> Any:
        runs.append(flow_run.id)
        return function()

    return PrivateFlow(noting, name=name)


def found(run: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(run))


def test_a_run_is_named_by_what_it_is_and_what_came_of_it(prefect: str) -> None:
    gate = {"decision": "reject", "reason": "NE is higher."}
    result = {"status": "ok", "model": {"version": 7}, "gate": gate, "eval": {"ne": 0.86421}}
    assert (
        flow(lambda: result)(load("configs/smoke.yaml"), {"training.epochs": 3, "seed": 2}, day="2025-01-03") == result
    )
    run = found(runs[-1])
    assert run.name == "train smoke epochs=3 seed=2 day=2025-01-03: v7 rejected, NE 0.8642"
    assert run.state is not None
    assert (run.state.name, run.state.message) == ("Completed", "version 7, rejected: NE is higher.")
    assert flow(lambda: 5)() == 5
    assert found(runs[-1]).name == "train smoke"


def test_a_secret_is_in_no_name(prefect: str) -> None:
    flow(lambda: None)(overrides={"registration.tracking_uri": "http://me:hunter2@host"})
    assert found(runs[-1]).name == "train smoke tracking_uri=********"


def test_an_interrupt_cancels_the_task_and_the_flows_around_it(
    prefect: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    holder: Any = SimpleNamespace(console=PrefectConsole(), config=load("configs/smoke.yaml"))

    @step("work")
    def work(workspace: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    inner = flow(lambda: work(holder))
    with pytest.raises(KeyboardInterrupt):
        flow(inner, "end-to-end")()
    assert [found(run).state_name for run in runs[-2:]] == ["Cancelled", "Cancelled"]
    assert not [line for line in caplog.messages if "Crash" in line or "Traceback" in line]


def test_a_command_heeds_that_its_run_is_cancelled_at_the_server(prefect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "others_can_cancel", True)
    monkeypatch.setattr(ending, "SECONDS_BETWEEN_POLLS", 0.05)
    monkeypatch.setattr(ending, "cancelled", threading.Event())

    def work() -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(flow_run.id), Cancelling(), force=True)
        limit = time.monotonic() + 90
        while time.monotonic() < limit:
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        flow(work)()
    assert ending.cancelled.is_set()
    assert found(runs[-1]).state_name == "Cancelled"


def test_an_error_of_ours_is_a_sentence_in_the_log_of_the_run(prefect: str, caplog: pytest.LogCaptureFixture) -> None:
    error = StorageError("table 'demo'", "a table of the warehouse", "none", "Ingest it first.")

    def fail() -> None:
        raise error

    with pytest.raises(StorageError), caplog.at_level(logging.ERROR):
        flow(fail)()
    assert f"failed: {error}" in caplog.messages
    assert "Traceback" not in caplog.text
    assert "StorageError(" not in caplog.text.replace("Finished in state Failed", "")


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        ("KeyboardInterrupt", 130, "error: interrupted; run the same command again to go on.\n"),
        (
            "ModuleNotFoundError(name='yaml')",
            1,
            "expected the project's packages, got no 'yaml'. Use .venv/bin/python, ",
        ),
    ],
)
def test_what_ends_the_imports_of_a_command_is_one_sentence(error: str, exit_code: int, said: str) -> None:
    """Ctrl-C in the first second, and a Python without our packages."""
    code = f"import flows.runtime; raise {error}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
