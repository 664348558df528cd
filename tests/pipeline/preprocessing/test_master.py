"""The master, driven step by step with a fake clock and fake workers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.position import Position
from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import (
    WorkDone,
    WorkerDied,
    WorkerStarted,
    WorkFailed,
)
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.quarantine import QUARANTINE_FILE
from tests.pipeline.preprocessing.fake_workers import BAD, FakeExecutor, Play


def test_work_goes_to_idle_workers_and_failed_work_is_retried(play: Callable[..., Play]) -> None:
    it = play()
    it.warmed()
    failed = it.executor.work[1]
    it.executor.fail(1)
    it.steps()
    assert it.executor.work[1] == failed
    assert it.master.totals.restarts == 0
    assert it.master.totals.peak_rss_mb.keys() <= {1, 2}


def test_a_dead_worker_is_replaced_and_its_work_done_again(play: Callable[..., Play], tmp_path: Path) -> None:
    it = play()
    it.warmed()
    lost = it.executor.work[1]
    it.master.events.put(WorkerDied(1, "its process ended"))
    it.steps()
    assert it.executor.alive == {2, 3}
    assert lost in it.executor.work.values()
    assert it.said == ["replacing worker 1 (process 1001): its process ended"]
    assert json.loads((tmp_path / "service" / WORKERS_FILE).read_text()) == {"2": 1002, "3": 1003}


def test_late_events_of_a_replaced_worker_do_not_count(play: Callable[..., Play]) -> None:
    it = play()
    stream = it.warmed()
    it.now += 121.0
    it.steps()
    assert it.executor.alive == {3, 4}
    running = set(stream.running)
    late = it.executor.finish(1)
    for event in (WorkFailed(2, BAD), WorkerDied(1, "late"), WorkerStarted(2, 5)):
        it.master.events.put(event)
    it.steps()
    assert it.executor.freed == [late]
    assert stream.running == running
    assert (it.master.totals.restarts, it.master.totals.late_results) == (2, 1)
    assert it.said == [f"replacing worker {n} (process {1000 + n}): it was silent for 121 s" for n in (1, 2)]


def test_a_lease_does_not_expire_while_the_answer_is_queued(play: Callable[..., Play]) -> None:
    """The master itself was delayed, by a slow catalog or because the machine was suspended."""
    it = play()
    it.warmed()
    for worker in (1, 2):
        it.executor.finish(worker)
    it.now += 10_000.0
    it.steps()
    assert it.master.totals.restarts == 0
    assert it.executor.alive == {1, 2}


def test_a_straggler_is_done_twice_and_the_first_result_counts(play: Callable[..., Play]) -> None:
    it = play()
    stream = it.warmed()
    straggler = it.executor.work[1]
    while any(n == 2 for n in it.executor.work):  # the other worker does the rest
        it.executor.finish(2)
        it.steps()
    it.after(3.9)
    assert 2 not in it.executor.work
    it.after(0.2)
    assert it.executor.work == {1: straggler, 2: straggler}
    it.executor.finish(2)
    it.steps()
    assert all(item.work != straggler for item in stream.running)
    late = it.executor.finish(1, seconds=60.0)
    it.steps()
    assert late in it.executor.freed
    assert (it.master.totals.late_results, it.master.totals.restarts) == (1, 0)


def work_of_both(it: Play) -> Any:
    """Lets worker 2 end all its work, so that it makes that of worker 1, too. Returns that work."""
    slow = it.executor.work[1]
    while 2 in it.executor.work:
        it.executor.finish(2)
        it.steps()
    it.after(10.0)
    assert it.executor.work == {1: slow, 2: slow}
    return slow


@pytest.mark.parametrize("how", ["died", "failed", "silent"])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_one_of_two_with_the_same_work_is_gone_then_the_other(
    how: str, order: tuple[int, int], play: Callable[..., Play]
) -> None:
    """Losing one keeps the work with the other. Losing both assigns it again."""
    it = play(lease_seconds=50.0)
    stream = it.warmed()
    straggler = work_of_both(it)
    for worker in order:
        if how == "died":
            it.master.events.put(WorkerDied(worker, "its process ended"))
        elif how == "failed" and worker in it.executor.work:
            it.executor.fail(worker)
        elif how == "silent":
            it.now += 25.0
        it.steps()
        assert straggler in it.executor.work.values()
        assert sum(item.work == straggler for item in stream.running) == 1
    if how == "silent":
        it.after(100.0)
        assert straggler in it.executor.work.values()
    assert it.master.failure is None
    delivered = 0
    while it.executor.work:
        it.executor.finish(next(iter(it.executor.work)))
        it.steps()
    while not stream.ended(delivered):
        assert it.master.get_group(stream, delivered) is not None
        stream.groups.take(delivered)
        stream.groups.release(0, delivered)
        delivered += 1
    it.master.close()
    assert len(it.executor.freed) == len(set(it.executor.freed)) == it.executor.made


def test_work_that_another_worker_still_does_has_not_failed(play: Callable[..., Play]) -> None:
    it = play(lease_seconds=50.0, attempts=1)
    stream = it.warmed()
    straggler = work_of_both(it)
    it.executor.fail(1)
    it.steps()
    assert it.master.failure is None
    it.executor.finish(2)
    it.steps()
    assert all(item.work != straggler for item in stream.running)


def test_work_that_hangs_every_worker_ends_the_run(play: Callable[..., Play]) -> None:
    """Workers that start at once do not keep it going by taking it over from one another for ever."""
    it = play(lease_seconds=6.0, attempts=2, restart_limit=100)
    it.warmed()
    while 2 in it.executor.work:
        it.executor.finish(2)
        it.steps()
    for _ in range(60):
        it.after(1.0)
    assert "expected work that a worker survives, got 2 workers that did not" in str(it.master.failure)
    assert it.master.totals.restarts <= 4  # two attempts, each by the worker and a second one


def test_a_stream_that_is_closed_takes_nothing_and_fails_nothing(play: Callable[..., Play]) -> None:
    """Results, failures and deaths of its work come later, while another stream continues."""
    it = play(workers=4, attempts=1, restart_limit=16)
    first = it.open()
    it.steps()
    for _ in range(2):
        it.executor.finish(next(iter(it.executor.work)))
        it.steps()
    old = dict(it.executor.work)
    assert len(old) == 4
    it.master.close_stream(first)
    second = it.open(seed=8)
    it.steps()
    it.executor.finish(1)
    it.executor.fail(2)
    it.master.events.put(WorkerDied(3, "its process ended"))
    it.steps()
    assert it.master.failure is None
    assert first.running == set()
    assert second.running
    assert it.master.streams == [second]
    it.master.config = it.master.config.model_copy(update={"attempts": 3})  # for the work of the second stream
    it.after(121.0)
    assert it.master.failure is None
    it.master.close()
    assert len(it.executor.freed) == it.executor.made


def test_the_limit_of_restarts(play: Callable[..., Play], tmp_path: Path) -> None:
    it = play(workers=1, restart_limit=2)
    stream = it.open()
    for worker in (1, 2, 3):
        it.steps()
        assert it.master.failure is None
        it.master.events.put(WorkerDied(worker, "its process ended"))
    it.steps()
    assert str(it.master.failure) == (
        "preprocessing workers: expected at most 2 replacements, got 3: the last worker had process id 1003, its process "
        f"ended. See {tmp_path}/service/worker-3.log, or raise preprocessing.restart_limit."
    )
    with pytest.raises(DataError):
        it.master.get_group(stream, 0)
    assert it.executor.alive == set()  # and no worker is started any more
    it.after(1000.0)
    assert (it.executor.alive, it.master.totals.restarts) == (set(), 3)


@pytest.mark.parametrize("kind", ["split", "batches"])
def test_work_that_kills_its_workers_is_named(kind: str, play: Callable[..., Play], tmp_path: Path) -> None:
    it = play(workers=1, attempts=2)
    it.open(window_rows=None)
    it.steps()
    if kind == "batches":
        while isinstance(it.executor.work[max(it.executor.alive)], Split):
            it.executor.finish(max(it.executor.alive))
            it.steps()
    work = it.executor.work[1]
    for worker in (1, 2):
        it.master.events.put(WorkerDied(worker, "its process ended"))
        it.steps()
    where = str(work) if isinstance(work, Split) else "batches"
    assert str(it.master.failure) == (
        f"{where}: expected work that a worker survives, got 2 workers that did not: its process ended. "
        f"See {tmp_path}/service/worker-2.log."
    )


def test_quarantine(play: Callable[..., Play], tmp_path: Path) -> None:
    """The last attempt reads a split by row group. Only a row group that fails again is given up."""
    it = play(workers=1, attempts=3, on_corrupt="quarantine")
    stream = it.open(position=Position(epoch=4))
    it.steps()
    while not (isinstance(split := it.executor.work[1], Split) and len(split.fragments) == 2):
        it.executor.finish(1)
        it.steps()
    for _ in range(2):
        assert it.executor.work[1] == split
        it.executor.fail(1)
        it.steps()
    bad, good = split.fragments
    assert it.executor.work[1] == Split(fragments=(bad,))
    it.executor.fail(1)
    it.steps()
    assert it.executor.work[1] == Split(fragments=(good,))
    it.executor.finish(1)
    it.steps()
    assert stream.quarantined == [Split(fragments=(bad,))]
    listed = [json.loads(line) for line in (tmp_path / "service" / QUARANTINE_FILE).read_text().splitlines()]
    assert listed == it.master.totals.quarantined
    assert listed == [
        bad.model_dump(mode="json")
        | {"data": "days", "epoch": 4, "reason": "row 3: expected something else, got this. Change it."}
    ]
    assert it.master.totals.quarantined_rows == bad.rows
    assert it.said == [
        f"quarantined {bad.rows:,} rows of {Split(fragments=(bad,))}: "
        "row 3: expected something else, got this. Change it."
    ]


def test_batches_that_cannot_be_made_are_never_quarantined(play: Callable[..., Play]) -> None:
    it = play(workers=1, attempts=1, on_corrupt="quarantine")
    it.open(window_rows=None)
    it.steps()
    while isinstance(it.executor.work[1], Split):
        it.executor.finish(1)
        it.steps()
    it.executor.fail(1)
    it.steps()
    assert it.master.failure is BAD


def test_the_first_error_counts_and_ends_all_work(play: Callable[..., Play]) -> None:
    it = play(attempts=1)
    it.warmed()
    it.executor.fail(1)
    it.steps()
    assert it.executor.alive == set()
    assert it.executor.work == {}
    with it.master.guard():
        raise DataError("another", "none", "one", "Wait.")
    assert it.master.failure is BAD


def test_an_unexpected_error_becomes_a_contract_error(
    play: Callable[..., Play], capsys: pytest.CaptureFixture[str]
) -> None:
    it = play()
    stream = it.warmed()
    with it.master.guard():
        raise OSError(28, "No space left\non device.")
    with pytest.raises(ContractError) as caught:
        it.master.get_group(stream, 10**6)
    assert str(caught.value) == (
        "preprocessing service: expected to keep running, got OSError: [Errno 28] No space left on device. "
        "See the traceback above."
    )
    assert "Traceback" in capsys.readouterr().err


def test_the_stream_requested_last_comes_first(play: Callable[..., Play]) -> None:
    it = play(workers=1)
    training = it.open()
    it.steps()
    it.executor.finish(1)
    it.steps()
    validation = it.open(number=1, window_rows=None)
    it.executor.finish(1)
    it.steps()
    assert len(validation.running) == 1
    assert not training.running


def test_ranks_with_equal_requests_share_a_stream(play: Callable[..., Play]) -> None:
    it = play()
    request = Request(
        data="days", number=0, position=Position(), batch_rows=10, seed=7, window_rows=None, world_size=2, ranks=(0, 1)
    )
    first = it.master.open(request, 0)
    assert it.master.open(request, 1) is first
    again = it.master.open(request, 0)
    assert again is not first
    assert it.master.open(request, 1) is again
    assert it.master.open(request.model_copy(update={"seed": 8}), 0) not in (first, again)
    it.master.leave(first, 1)
    assert first in it.master.streams
    it.master.leave(first, 0)
    assert first not in it.master.streams
    it.master.leave(first, 0)


def test_a_rank_that_left_early_is_not_waited_for_but_may_return(play: Callable[..., Play]) -> None:
    it = play()
    request = Request(
        data="days", number=0, position=Position(), batch_rows=10, seed=7, window_rows=None, world_size=2, ranks=(0, 1)
    )
    it.master.leave(it.master.open(request, 0), 0)
    assert it.master.streams == []
    assert it.master.open(request, 1).left == {0}
    it.master.leave(it.master.open(request, 0), 0)
    assert it.master.open(request, 0).left == set()
    assert it.master.left == {}


def test_an_unknown_dataset(play: Callable[..., Play]) -> None:
    it = play()
    with pytest.raises(ConfigError) as caught:
        it.open(data="valid")
    assert str(caught.value) == (
        "preprocessing service: expected the name of a dataset: 'days', got 'valid'. Request one of them."
    )


def test_closing_frees_results_in_the_queue(play: Callable[..., Play]) -> None:
    it = play()
    it.warmed()
    it.executor.finish(1)
    it.executor.finish(2)
    it.master.close()
    assert it.executor.alive == set()
    assert len(it.executor.freed) == it.executor.made == 4


def test_a_worker_that_may_not_start_ends_the_service(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others could not start either, so none takes its place."""
    monkeypatch.setattr(FakeExecutor, "start", lambda self, number: self.alive.add(number))
    it = play()
    with it.master.guard():
        it.open()
        it.steps()
        it.master.handle(WorkFailed(1, BAD))
    assert it.master.failure is BAD
    assert (it.executor.alive, it.master.totals.restarts, it.said) == (set(), 0, [])


def test_a_worker_that_answers_unasked_is_replaced(play: Callable[..., Play]) -> None:
    it = play()
    it.warmed()
    with it.master.guard():
        it.master.handle(WorkFailed(1, BAD))
        it.master.handle(WorkDone(1, "unasked", 1000, 9, Costs(), 77))
    it.steps()
    assert it.master.failure is None
    assert it.executor.freed == ["unasked"]
    assert it.executor.alive == {2, 3}
    assert it.said == ["replacing worker 1 (process 1001): it sent a result that nobody had asked for"]
