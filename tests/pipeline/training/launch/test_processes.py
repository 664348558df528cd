"""Ranks end when they should and leave nothing behind. These ranks need no torch and start at once."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from pipeline.errors import ColumnError, ContractError, TrainingError
from pipeline.processes import forkserver
from pipeline.processes.forkserver import stop_servers
from pipeline.training.launch import processes
from pipeline.training.launch.processes import Event, Limits, run_alone, run_ranks

TOY = """
import json, os, signal, sys, time
from pathlib import Path
def emit(**event):
    os.write(int(os.environ["DLRM_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
def wait():
    while True:
        time.sleep(60)
if __name__ == "__main__" and len(sys.argv) == 3:
    does = json.loads(Path(sys.argv[2]).read_text())["does"][0]
    if does == "crash":
        sys.exit("MemoryError: no luck today.")
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    name, value = ("answer", [sys.argv[1], 42]) if does == "answer" else ("error", ["ColumnError", "a", "b", "c", "d"])
    (Path(sys.argv[2]).parent / f"{name}.json").write_text(json.dumps(value))
    sys.exit(name == "error")
if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]).parent, int(os.environ["RANK"])
    attempts = json.loads(Path(sys.argv[1]).read_text())["does"][rank].split("|")
    does = attempts[min(int(os.environ["DLRM_ATTEMPT"]), len(attempts) - 1)]
    (folder / f"environment-{rank}").write_text(json.dumps(dict(os.environ)))
    if "DLRM_EVENTS_FD" in os.environ:
        emit(event="start", pid=os.getpid())
    for word in does.split():
        if word == "complain":
            (folder / f"error-{rank}.json").write_text(json.dumps(["ColumnError", "column 'a'", "numbers", "text", "Convert it."]))
            sys.exit("ContractError")
        elif word == "crash":
            print("first line"); print("RuntimeError: no luck today.")
            sys.exit(3)
        elif word == "137":
            os._exit(137)
        elif word.startswith(("saved-", "resumed-")):
            emit(event=word.split("-")[0], step=int(word.split("-")[1]))
        elif word in ("alive", "waiting"):
            for count in range(1_000):
                emit(event="alive", count=0 if word == "waiting" else count, doing="waiting for a batch")
                time.sleep(0.05)
        elif word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "junk":
            os.write(int(os.environ["DLRM_EVENTS_FD"]), b"\\xff\\xfe no event\\n")
        elif word == "half":
            os.write(int(os.environ["DLRM_EVENTS_FD"]), b'{"event": "resu')
        elif word == "wait":
            wait()
        elif word == "result":
            emit(event="result", value=42)
        elif word == "ready":
            (folder / f"ready-{rank}").touch()
        elif word == "after-peer":
            while not (folder / "ready-1").exists():
                time.sleep(0.01)
"""


class Spec(BaseModel):
    does: list[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Event]]:
    """Runs one toy rank for each text, then checks that nothing is left behind."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)

    def start(*does: str, on_event: Callable[[Event], None] = lambda event: None, **limits: Any) -> Event:
        limit = Limits(**{"deadline_seconds": 60, **limits})
        return run_ranks("toy", Spec(does=list(does)), tmp_path / "run", len(does), 1, limit, on_event, tmp_path)

    monkeypatch.setattr(forkserver, "_servers", [])
    before, others = open_files(), set(psutil.Process().children())
    yield start
    assert [server.running for server in forkserver._servers if not server.is_idle()] == []
    stop_servers()
    assert set(psutil.Process().children()) <= others
    eventually(lambda: open_files() == before)  # the reading thread closes its end by itself
    assert not list((tmp_path / "run").glob(".*"))


def open_files() -> list[str]:
    """Returns the pipes of this process. Reading the list opens one more file, which is not a pipe."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return sorted(link for link in links if link.startswith("pipe:"))


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come true in time"
        time.sleep(0.02)


def test_result_and_events(run: Callable[..., Event], tmp_path: Path) -> None:
    events: list[Event] = []
    assert run("result", "", "", on_event=events.append) == {"event": "result", "value": 42, "restarts": 0}
    assert [event["event"] for event in events] == ["start", "result"]
    environments = [read_json(tmp_path / "run" / f"environment-{rank}") for rank in range(3)]
    assert [env["RANK"] for env in environments] == ["0", "1", "2"]
    assert {(env["WORLD_SIZE"], env["OMP_NUM_THREADS"]) for env in environments} == {("3", "1")}
    assert ["DLRM_EVENTS_FD" in env for env in environments] == [True, False, False]
    assert {env["GOMP_SPINCOUNT"] for env in environments} == {"20000"}
    kept = {(env["MALLOC_MMAP_THRESHOLD_"], env["MALLOC_TRIM_THRESHOLD_"]) for env in environments}
    assert kept == {(str(2**28), str(2**30))}


def read_json(path: Path) -> dict[str, Any]:

    value: dict[str, Any] = json.loads(path.read_text())
    return value


@pytest.mark.parametrize("does", [("complain", "wait"), ("wait", "complain"), ("after-peer crash", "ready complain")])
def test_the_error_of_a_rank_comes_back_whole(run: Callable[..., Event], does: tuple[str, str]) -> None:
    with pytest.raises(ColumnError) as caught:
        run(*does)
    error = caught.value
    assert (error.where, error.expected, error.actual, error.remedy) == ("column 'a'", "numbers", "text", "Convert it.")


def test_an_error_of_an_earlier_run_is_forgotten(run: Callable[..., Event]) -> None:
    with pytest.raises(ContractError):
        run("wait", "complain")
    assert run("result", "")["value"] == 42


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (("wait", "crash"), "rank 1: expected to train to the end, got exit code 3: RuntimeError: no luck today. Run"),
        (("kill", "wait"), "rank 0: expected to train to the end, got SIGKILL: no output. Run"),
        (("result half kill", ""), "rank 0: expected to train to the end, got SIGKILL: no output. Run"),
        (("half", ""), "training: expected a result from rank 0, got none. See"),
    ],
)
def test_the_error_of_a_crash_quotes_the_end_of_the_log(
    run: Callable[..., Event], tmp_path: Path, does: tuple[str, str], message: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        run(*does)
    assert str(caught.value).startswith(message)
    log = Path(caught.value.remedy.rsplit(" ", 1)[1].removesuffix("."))
    assert log.parent == tmp_path / "run"
    assert log.exists()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("does", [("result wait", "wait"), ("result", "stop"), ("deaf wait", "result-less wait")])
def test_hung_ranks_end_at_the_deadline(run: Callable[..., Event], does: tuple[str, str]) -> None:
    with pytest.raises(TrainingError) as caught:
        run(*does, deadline_seconds=1)
    assert str(caught.value) == (
        "training: expected to finish within training.deadline_seconds=1, got ranks still running. "
        "Raise it, or run the command again to resume from the last checkpoint."
    )


def test_a_rank_stopped_from_outside_ends_at_the_deadline(run: Callable[..., Event]) -> None:
    with pytest.raises(TrainingError, match="deadline_seconds=1"):
        run("wait", "wait", deadline_seconds=1, on_event=lambda event: os.kill(event["pid"], signal.SIGSTOP))


def test_an_interrupted_launcher_ends_its_ranks(run: Callable[..., Event]) -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("wait", "deaf wait", on_event=interrupt)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (("wait|result", "kill|"), "rank 1: SIGKILL: no output"),
        (("137|result", "wait|"), "rank 0: exit code 137: no output"),
        (("crash|result", "wait|"), "rank 0: exit code 3: RuntimeError: no luck today"),
        (
            ("after-peer crash|result", "ready kill|"),
            "rank 1: SIGKILL: no output",
        ),  # not the error of the rank that lost its peer
    ],
)
def test_all_ranks_start_again_when_one_dies(
    run: Callable[..., Event], tmp_path: Path, does: tuple[str, str], reason: str
) -> None:
    events: list[Event] = []
    assert run(*does, restart_limit=1, on_event=events.append)["restarts"] == 1
    seen = [event for event in events if event["event"] != "start"]  # a rank may be killed before it says so
    assert [event["event"] for event in seen] == ["restart", "result"]
    assert seen[0] == {"event": "restart", "step": 0, "number": 1, "limit": 1, "reason": reason}
    if "crash" in does[0]:
        assert "no luck today" in (tmp_path / "run" / "rank-0.log").read_text()  # the log of the first attempt is kept


def test_the_limit_of_restarts(run: Callable[..., Event]) -> None:
    events: list[Event] = []
    with pytest.raises(TrainingError) as caught:
        run("wait", "kill", restart_limit=2, on_event=events.append)
    assert str(caught.value).startswith(
        "rank 1: expected to train to the end, got SIGKILL: no output, also after 2 restarts from step 0. Run the command"
    )
    assert [event["number"] for event in events if event["event"] == "restart"] == [1, 2]


@pytest.mark.slow
def test_progress_resets_the_restart_count(run: Callable[..., Event]) -> None:
    events: list[Event] = []
    does = "saved-2 kill|kill|resumed-2 saved-4 kill|saved-6 kill|result"
    assert run(does, restart_limit=2, on_event=events.append)["restarts"] == 4
    found = [(event["step"], event["number"]) for event in events if event["event"] == "restart"]
    assert found == [(2, 1), (2, 2), (4, 1), (6, 1)]


def test_an_older_checkpoint_is_no_progress(run: Callable[..., Event]) -> None:
    """The newest was damaged, so ranks resume from an earlier one."""
    with pytest.raises(TrainingError, match="also after 1 restarts from step 2"):
        run("saved-4 kill|resumed-2 kill|resumed-2 kill", restart_limit=1)


def test_an_error_of_a_rank_is_not_retried(run: Callable[..., Event]) -> None:
    events: list[Event] = []
    with pytest.raises(ContractError, match="column 'a'"):
        run("wait|result", "complain|", restart_limit=3, on_event=events.append)
    assert "restart" not in [event["event"] for event in events]


@pytest.mark.parametrize("does", ["stop|result", "waiting|result"])
def test_a_hung_group_starts_again(run: Callable[..., Event], does: str) -> None:
    events: list[Event] = []
    assert run(does, "wait|", hang_seconds=2, restart_limit=1, on_event=events.append)["restarts"] == 1
    doing = {"stop": "starting", "waiting": "waiting for a batch"}[does.split("|")[0]]
    assert [event["reason"] for event in events if event["event"] == "restart"] == [
        f"ranks: none while rank 0 was {doing}"
    ]


def test_a_group_that_hangs_for_good_is_an_error(run: Callable[..., Event], tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        run("waiting", "wait", hang_seconds=1)
    assert str(caught.value) == (
        "ranks: expected progress within training.hang_seconds=1, got none while rank 0 was waiting for a batch. "
        f"Raise it if a step may take longer. See {tmp_path}/run/rank-*.log. The last checkpoint is kept."
    )


@pytest.mark.slow
@pytest.mark.parametrize("does", ["alive", "waiting"])
def test_progress_keeps_a_group_alive(run: Callable[..., Event], does: str) -> None:
    """Its own progress, or that of preprocessing while it waits."""
    ticks = iter(range(10_000))
    with pytest.raises(TrainingError, match="deadline_seconds=3"):
        run(does, "wait", hang_seconds=1, deadline_seconds=3, progress=lambda: next(ticks) if does == "waiting" else 0)


def test_progress_of_preprocessing_does_not_hide_a_hung_step(run: Callable[..., Event]) -> None:
    ticks = iter(range(10_000))
    with pytest.raises(TrainingError, match="got none while rank 0 was starting"):
        run("wait", "wait", hang_seconds=1, progress=lambda: next(ticks))


def test_ranks_that_cannot_start_leave_nothing(run: Callable[..., Event], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_ranks("toy", Spec(does=[""]), tmp_path / "run", 1, 1, Limits(), print, tmp_path / "absent")


def test_a_process_alone_answers_or_says_why_not(run: Callable[..., Event], tmp_path: Path) -> None:
    """`run` puts the module there. What one attempt left does not count for the next."""

    def alone(does: str) -> Any:
        return run_alone("toy", "plan", Spec(does=[does]), tmp_path / "alone", 1, tmp_path)

    with pytest.raises(ColumnError, match="a: expected b, got c"):
        alone("complain")
    assert alone("answer") == ["plan", 42]
    for does, words in (("crash", "exit code 1: MemoryError: no luck today"), ("kill", "SIGKILL: no output")):
        with pytest.raises(TrainingError, match=words):
            alone(does)


def test_a_line_that_is_no_event_ends_the_ranks(run: Callable[..., Event], tmp_path: Path) -> None:
    """Also if it is no text: then the launcher must not wait for an end that it does not see."""
    with pytest.raises(TrainingError) as caught:
        run("junk wait")
    assert f"{caught.value}" == (
        "event of rank 0: expected what ranks report, got \ufffd\ufffd no event. Run the command again to resume from the "
        f"last checkpoint. See {tmp_path}/run/rank-0.log."
    )
