"""Workers are killed, stopped, slowed and hung, rows are unreadable, memory is short: the order stays the same."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import ContractError
from pipeline.preprocessing import service as service_module
from pipeline.preprocessing.client import BatchSource, InlineSource
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.quarantine import QUARANTINE_FILE
from pipeline.preprocessing.service import Service
from tests.pipeline.preprocessing.reference import (
    CONFIG,
    ROOT,
    TIGHT_BYTES,
    Reference,
    all_equal,
    client,
    column_of,
    corrupt,
    eventually,
    files_of,
    joined,
    layout,
    numbers,
    order_hash,
    source_of,
)
from tests.segments import left_since, segments

Serve = Callable[..., Service]


@pytest.fixture(params=["memory", pytest.param("network", marks=pytest.mark.nightly)])
def transport(request: pytest.FixtureRequest) -> str:
    """Every fault is survived alike, whatever carries the batches."""
    name: str = request.param
    return name


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> list[Master]:
    """Collects the masters of the services that a test starts."""
    made: list[Master] = []

    class Noted(Master):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(service_module, "Master", Noted)
    return made


def pids(service: Service) -> list[int]:
    """Returns the workers' process ids, by number of the worker."""
    file = service.folder / WORKERS_FILE
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return [known[number] for number in sorted(known, key=int)]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def workers(service: Service, count: int) -> list[int]:
    """Waits for this many workers and returns their process ids."""
    return list(eventually(lambda: (found := pids(service))[: len(found) * (len(found) >= count)], 60.0))


def disturbed(
    batches: Iterable[Batch], schedule: dict[int, Callable[[], object]], found: list[Batch] | None = None
) -> list[Batch]:
    """Collects all batches and runs an action after some of them, by their count."""
    found = [] if found is None else found
    for batch in batches:
        found.append(batch)
        if len(found) in schedule:
            schedule[len(found)]()
    return found


def kill(service: Service, count: int, chance: random.Random) -> None:
    """Kills this many workers, or all of them if there are fewer."""
    known = eventually(lambda: [pid for pid in pids(service) if alive(pid)], 60.0)
    for pid in chance.sample(known, min(count, len(known))):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


# -- 14: workers die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "count", "killed"),
    [
        (0, 2, 1),
        pytest.param(1, 2, 2, marks=pytest.mark.nightly),
        pytest.param(2, 4, 3, marks=pytest.mark.nightly),
        pytest.param(3, 3, 1, marks=pytest.mark.nightly),
        pytest.param(4, 1, 1, marks=pytest.mark.nightly),
    ],
)
def test_killed_workers(
    seed: int, count: int, killed: int, serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table]
) -> None:
    """At two or three seeded batches, in one case all workers."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, 13), 2 if count == 2 else 3))
    service = serve(count, attempts=len(steps) + 1, **tight)  # chance may hit the same work each time
    workers(service, count)
    schedule = {step: lambda: kill(service, killed, chance) for step in steps}
    found = disturbed(client(source_of(service), data).batches(), schedule)
    expected = Reference(data, days).batches()
    assert all_equal(found, expected)
    assert order_hash(found) == order_hash(expected)
    assert 1 <= service.totals.restarts <= len(steps) * killed  # a dead worker may be hit again
    assert service.totals.quarantined == []


@pytest.mark.nightly
def test_workers_killed_before_they_are_ready(
    masters: list[Master], serve: Serve, data: DataSpec, days: list[pa.Table]
) -> None:
    service = serve(1)
    for number in (1, 2):
        eventually(lambda: masters and masters[0].pool.started == number and number in masters[0].pool.workers)  # noqa: B023
        processes = masters[0].executor.processes  # type: ignore[attr-defined]
        os.kill(eventually(lambda: processes.get(number)).pid, signal.SIGKILL)  # noqa: B023
    assert all_equal(client(source_of(service), data).batches(), Reference(data, days).batches())
    assert service.totals.restarts == 2


@pytest.mark.nightly
def test_the_restart_limit_ends_the_run(serve: Serve, tight: dict[str, Any], data: DataSpec) -> None:
    service = serve(1, restart_limit=1, **tight)
    last: list[int] = []

    def kill_it() -> None:
        eventually(lambda: pids(service) != last and pids(service), 60.0)
        last[:] = pids(service)
        os.kill(last[0], signal.SIGKILL)

    found: list[Batch] = []
    with pytest.raises(ContractError) as caught:
        disturbed(client(source_of(service), data).batches(), {1: kill_it, 2: kill_it}, found)
    assert 2 <= len(found) < 16
    assert str(caught.value) == (
        f"preprocessing workers: expected at most 1 replacements, got 2: the last worker had process id {last[0]}, "
        f"its process ended. See {service.folder}/worker-2.log, or raise preprocessing.restart_limit."
    )
    assert service.totals.restarts == 2
    assert pids(service) == []


# -- 15: workers fall silent, or are slow -----------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [1, 2])
def test_stopped_workers_are_replaced(
    stopped: int,
    serve: Serve,
    tight: dict[str, Any],
    data: DataSpec,
    days: list[pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their leases expire and others do their work. Nothing comes twice."""
    monkeypatch.setattr("pipeline.preprocessing.pool.STRAGGLER_SECONDS", 10**6)  # only the lease may help
    service = serve(2, lease_seconds=4.0, **tight)
    known = workers(service, 2)
    batches = client(source_of(service), data).batches()
    found = disturbed(batches, {2: lambda: [stop(pid) for pid in known[:stopped]]})
    assert all_equal(found, Reference(data, days).batches())
    assert stopped <= service.totals.restarts <= stopped + 1
    assert not any(alive(pid) for pid in known[:stopped])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory"])
def test_a_stragglers_work_is_done_twice_and_its_late_result_dropped(
    serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.preprocessing.pool.STRAGGLER_SECONDS", 0.3)
    service = serve(2, **tight)  # leases are long
    slow = workers(service, 2)[0]
    batches = client(source_of(service), data).batches()
    found = disturbed(batches, {2: lambda: stop(slow)})
    assert all_equal(found, Reference(data, days).batches())
    assert (service.totals.restarts, service.totals.late_results) == (0, 0)
    resume(slow)
    eventually(lambda: service.totals.late_results == 1)
    assert all_equal(client(source_of(service), data).batches(), Reference(data, days).batches())
    assert service.totals.restarts == 0


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["network"])
def test_a_worker_that_does_not_serve_what_it_keeps_is_replaced(
    serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its lease ends: ranks and other workers report it."""
    monkeypatch.setattr("pipeline.preprocessing.transport.source.TRANSFER_SECONDS", 1.0)
    service = serve(2, **tight)
    stopped = workers(service, 2)[0]
    found = disturbed(client(source_of(service), data).batches(), {2: lambda: stop(stopped)})
    assert all_equal(found, Reference(data, days).batches())
    assert service.totals.restarts == 1
    assert not alive(stopped)


@contextmanager
def slowed(pid: int, share: float) -> Iterator[None]:
    """Lets a process run only this share of the time."""
    ended = threading.Event()

    def cycle() -> None:
        while not ended.wait(0.01 * share):
            stop(pid)
            ended.wait(0.01 * (1.0 - share))
            resume(pid)

    thread = threading.Thread(target=cycle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        resume(pid)


@pytest.mark.nightly
def test_a_worker_twenty_times_slower(
    serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.preprocessing.pool.STRAGGLER_SECONDS", 0.1)
    monkeypatch.setattr("pipeline.preprocessing.transport.source.TRANSFER_SECONDS", 120.0)  # it serves, if slowly
    service = serve(2, **tight)
    slow = workers(service, 2)[0]
    reference = Reference(data, days)
    with slowed(slow, 0.05):
        for epoch in range(2):
            batches = client(source_of(service), data).batches(Position(epoch=epoch))
            assert all_equal(batches, reference.batches(epoch))
    assert service.totals.restarts == 0
    assert service.totals.quarantined == []


@pytest.fixture
def hung(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path: Path, tight: dict[str, Any]
) -> Callable[..., tuple[Service, Iterator[Batch], Path]]:
    """(serve, **config) -> a service, a started epoch, and a data file that never ends."""

    def make(serve: Serve, **config: Any) -> tuple[Service, Iterator[Batch], Path]:
        spec = make_warehouse(tmp_path / "warehouse", days)
        service = serve(2, spec, **tight, **config)
        workers(service, 2)
        batches = client(source_of(service), spec).batches()
        first = next(batches)
        order = [row for window in Reference(spec, days).windows(7, 0, 250, 150) for row in window]
        starts = {file: layout(file)[0][0] for file in files_of(spec)}
        late = max(
            files_of(spec), key=lambda file: min(order.index(starts[file] + i) for i in range(layout(file)[0][1]))
        )
        pipe = late.with_suffix(".pipe")
        os.mkfifo(pipe)
        pipe.replace(late)  # at once: a worker that opens no file at all has another error
        return service, _with(first, batches), late

    return make


def _with(first: Batch, batches: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    yield from batches


@pytest.mark.nightly
def test_work_that_hangs_ends_the_run_and_is_named(
    serve: Serve, hung: Callable[..., tuple[Service, Iterator[Batch], Path]]
) -> None:
    service, batches, file = hung(serve, lease_seconds=3.0, attempts=2)
    with pytest.raises(ContractError) as caught:
        list(batches)
    text = str(caught.value)
    assert text.startswith("row group ")
    assert f"of file 'file://{file}'" in text
    assert ": expected work that a worker survives, got 2 workers that did not: it was silent for " in text
    assert text.endswith(".log.")
    assert service.totals.restarts >= 2


@pytest.mark.nightly
def test_work_that_hangs_can_be_quarantined(
    serve: Serve, hung: Callable[..., tuple[Service, Iterator[Batch], Path]], days: list[pa.Table], data: DataSpec
) -> None:
    service, batches, file = hung(serve, lease_seconds=3.0, attempts=1, on_corrupt="quarantine")
    found = list(batches)
    listed = quarantined(service)
    assert f"file://{file}" in {entry["path"] for entry in listed}  # and the row groups of the same split
    assert sum(entry["rows"] for entry in listed) == service.totals.quarantined_rows == 2481 - len(numbers(found))
    assert len(set(numbers(found))) == len(numbers(found))


# -- 16: work that always fails ---------------------------------------------------------------------------------------


def quarantined(service: Service) -> list[dict[str, Any]]:
    lines = (service.folder / QUARANTINE_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(params=["pages", "label"])
def poisoned(
    request: pytest.FixtureRequest, days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path: Path
) -> tuple[DataSpec, list[pa.Table], Path, str]:
    """Some rows are unreadable: the spec, the tables, the file and the start of the error."""
    if request.param == "pages":
        spec = make_warehouse(tmp_path / "warehouse", days)
        file = files_of(spec)[4]
        corrupt(file)
        said = f"file 'file://{file}' of snapshot {spec.snapshot.snapshot_id} of table 't': expected a whole Parquet file, got "
        return spec, days, file, said
    tables = [days[0], column_of(days[1], "label", 333, 2), *days[2:]]
    spec = make_warehouse(tmp_path / "warehouse", tables)
    bad = 720 + 333
    groups = [(file, *group) for file in files_of(spec) for group in layout(file)]
    file, group = next((file, name[1]) for file, first, rows, name in groups if first <= bad < first + rows)
    said = f"label 'label' in row group {group} of file 'file://{file}': expected 0 or 1, got 2. Correct the source and ingest the day with force=true."
    return spec, tables, file, said


@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_poison_split_fails_after_its_attempts(
    executor: str, poisoned: tuple[DataSpec, list[pa.Table], Path, str], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _, _, said = poisoned
    failures: list[int] = []
    failed = Master._handle_failure

    def noting(self: Master, item: Any, error: ContractError) -> None:
        failed(self, item, error)
        failures.append(item.failures)

    monkeypatch.setattr(Master, "_handle_failure", noting)
    service = serve(1, spec, executor=executor)
    with pytest.raises(ContractError) as caught:
        list(client(source_of(service), spec).batches())
    assert str(caught.value).startswith(said)
    assert failures == [1, 2]  # the third attempt ended the run
    assert service.totals.restarts == 0


@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_poison_split_is_quarantined(
    executor: str, poisoned: tuple[DataSpec, list[pa.Table], Path, str], serve: Serve
) -> None:
    """Its rows are listed and counted. All others come once, in the order without these rows."""
    spec, tables, file, said = poisoned
    sentences: list[str] = []
    service = serve(2, spec, executor=executor, on_corrupt="quarantine")
    service.warn = sentences.append
    for epoch in range(2):
        found = list(client(source_of(service), spec).batches(Position(epoch=epoch)))
        listed = [entry for entry in quarantined(service) if entry["epoch"] == epoch]
        lost = [(Path(entry["path"]).name, entry["row_group"]) for entry in listed]
        assert {name for name, _ in lost} == {file.name}
        reference = Reference(spec, tables, lost)
        assert all_equal(found, reference.batches(epoch))
        rows = sum(entry["rows"] for entry in listed)
        assert len(set(numbers(found))) == len(numbers(found)) == 2481 - rows
        stored = {name: count for path in files_of(spec) for _, count, name in layout(path)}
        assert [entry["rows"] for entry in listed] == [stored[name] for name in lost]
        assert all(entry["reason"].startswith(said) and entry["data"] == "days" for entry in listed)
    assert service.totals.quarantined == quarantined(service)
    assert service.totals.quarantined_rows == sum(entry["rows"] for entry in quarantined(service))


def test_the_list_of_quarantined_rows_outlives_the_service(
    poisoned: tuple[DataSpec, list[pa.Table], Path, str], tmp_path: Path, nothing_left: None
) -> None:
    """A resumed run adds to it and lists nothing twice."""
    spec = poisoned[0]
    config = CONFIG.model_copy(update={"executor": "inline", "on_corrupt": "quarantine"})
    listed = []
    for epochs in ([0], [0, 1]):
        with Service({"days": spec}, config, tmp_path / "kept") as service:
            for epoch in epochs:
                list(client(source_of(service), spec).batches(Position(epoch=epoch)))
            listed.append(quarantined(service))
    assert listed[1][: len(listed[0])] == listed[0]
    assert {entry["epoch"] for entry in listed[1][len(listed[0]) :]} == {1}


def test_everything_can_be_quarantined(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path: Path
) -> None:
    spec = make_warehouse(tmp_path / "warehouse", [column_of(days[0].slice(0, 90), "label", 3, -1)])
    source = InlineSource({"days": spec}, CONFIG.model_copy(update={"on_corrupt": "quarantine"}))
    assert list(client(source, spec).batches()) == []
    assert source.master.totals.quarantined_rows == 90


# -- 17: memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["memory"])  # over the network a rank holds more than this small epoch
def test_a_slow_trainer_holds_the_workers_back(
    masters: list[Master], serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table]
) -> None:
    service = serve(2, **tight)
    found: list[Batch] = []
    batches = client(source_of(service), data).batches()
    rows_read = []
    for batch in batches:
        found.append(batch)
        if len(found) in (1, 3, 5):
            at_rest(masters[0])
            assert 0.3 * TIGHT_BYTES < masters[0].streams[0].budget.used <= TIGHT_BYTES
            rows_read.append(masters[0].totals.rows)
    assert rows_read == sorted(set(rows_read))
    assert rows_read[-1] < 2481  # rows were left to read at every check
    assert all_equal(found, Reference(data, days).batches())
    eventually(lambda: not masters[0].streams)
    group = 160 * (4 * (3 + 2 + 2) + 8 * 4) + 1_000  # dense, labels and weights, lengths, ids; alignment and shares
    assert 0.3 * TIGHT_BYTES < service.totals.peak_bytes <= TIGHT_BYTES + group


def at_rest(master: Master) -> None:
    """Waits until the workers are idle for a while."""
    since, rows = time.monotonic(), -1

    def resting() -> bool:
        nonlocal since, rows
        idle = all(worker.idle for worker in list(master.pool.workers.values()))
        if not idle or rows != master.totals.rows:
            since, rows = time.monotonic(), master.totals.rows
        return time.monotonic() - since > 0.3

    eventually(resting)


@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.nightly)])
def test_too_little_memory_is_an_error(executor: str, serve: Serve, tight: dict[str, Any], data: DataSpec) -> None:
    service = serve(1, executor=executor, memory_bytes=12_000)
    with pytest.raises(ContractError) as caught:
        list(client(source_of(service), data).batches())
    text = str(caught.value)
    assert text.startswith(
        "preprocessing.memory_bytes: expected room for the rows of a shuffle block and a group of batches, "
        "got 12,000 bytes for 'days', "
    )
    assert text.endswith(" of them in use. Raise it, or lower preprocessing.shuffle_window_rows.")


@pytest.mark.parametrize(
    ("executor", "apart"), [("inline", 4_000), pytest.param("process", 16_000, marks=pytest.mark.nightly)]
)
def test_memory_that_becomes_too_little_is_an_error_too(
    executor: str, apart: int, serve: Serve, tight: dict[str, Any], data: DataSpec
) -> None:
    """After the first batches, the bound fits one window and its batches, but not the rest of it and another window."""
    late = 0
    for memory_bytes in range(16_000, 80_000, apart):
        service = serve(1, executor=executor, memory_bytes=memory_bytes)
        found: list[Batch] = []
        said = ""
        try:
            disturbed(client(source_of(service), data).batches(), {}, found)
        except ContractError as error:
            said = str(error)
        assert said.endswith("Raise it, or lower preprocessing.shuffle_window_rows." if len(found) < 16 else "")
        late += 0 < len(found) < 16
        if not said:
            break
    assert len(found) == 16
    assert late


@pytest.mark.nightly
def test_a_slow_source_shows_in_the_time_waited(
    serve: Serve, tight: dict[str, Any], data: DataSpec, days: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(1, **tight)
    pid = workers(service, 1)[0]
    batches = client(source_of(service), data).batches()
    found = disturbed((next(batches) for _ in range(3)), {3: lambda: stop(pid)})
    timer = threading.Timer(1.0, resume, [pid])
    begun = time.perf_counter()
    timer.start()
    found += batches
    took = time.perf_counter() - begun
    timer.join()
    waited = sum(batch.times.wait for batch in found[3:])
    assert 0.8 <= waited <= took
    assert all_equal(found, Reference(data, days).batches())
    assert all(batch.times.extract > 0.0 and batch.times.transform > 0.0 for batch in found)


# -- 18: the master dies ----------------------------------------------------------------------------------------------

MASTER = """
import sys
from pathlib import Path
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.dataset import DataSpec
from tests.pipeline.preprocessing.reference import CONFIG, client, source_of
spec = DataSpec.model_validate_json(Path(sys.argv[1]).read_text())
config = CONFIG.model_copy(update={"executor": "process", "workers": 2})
with Service({"days": spec}, config, Path(sys.argv[2])) as service:
    print(service.address, flush=True)
    for batch in client(source_of(service), spec).batches():
        print(batch.position.model_dump_json(), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 9])
def test_a_killed_master_takes_its_workers_along_and_the_order_continues(
    stop_at: int, sources: Callable[[str], BatchSource], data: DataSpec, days: list[pa.Table], tmp_path: Path
) -> None:
    (tmp_path / "spec.json").write_text(data.model_dump_json())
    shared = segments()
    command = [sys.executable, "-W", "ignore", "-c", MASTER, str(tmp_path / "spec.json"), str(tmp_path / "service")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().decode().strip()
        for _ in range(stop_at):
            position = Position.model_validate_json(process.stdout.readline())
            process.stdin.write(b"\n")
        known = eventually(lambda: len(found := _known(tmp_path / "service")) == 2 and found)
        assert all(alive(pid) for pid in known)
        assert address in Path("/proc/net/unix").read_text(encoding="utf-8")
        process.kill()
    eventually(lambda: not any(alive(pid) for pid in known), 15.0, "workers outlive their master")
    assert address not in Path("/proc/net/unix").read_text(encoding="utf-8")
    eventually(lambda: not left_since(shared), 15.0, "shared memory outlives its master")
    assert {path.name for path in (tmp_path / "service").iterdir()} == {"workers.json", "worker-1.log", "worker-2.log"}
    ranks = [client(sources("inline"), data, rank=rank, world_size=2).batches(position) for rank in range(2)]
    rest = [joined(shares) for shares in zip(*ranks, strict=True)]
    assert all_equal(rest, Reference(data, days).batches()[stop_at:])


def _known(folder: Path) -> list[int]:
    file = folder / WORKERS_FILE
    return list(json.loads(file.read_text(encoding="utf-8")).values()) if file.exists() else []
