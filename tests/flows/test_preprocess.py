"""One epoch without a trainer: its order, its costs compared with the files, and disturbances."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from flows.ingest import ingest
from flows.preprocess import preprocess
from pipeline.config import RunConfig, load
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.drain import drain
from pipeline.preprocessing.pool import WORKERS_FILE
from tests.homes import CONFIG, files_of, open_smoke

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "status",
    "snapshot_id",
    "plan_hash",
    "rows",
    "batches",
    "order_hash",
    "seconds",
    "rows_per_second",
    "workers",
    "executor",
    "transform_ratio",
    "read_seconds",
    "transform_seconds",
    "batch_seconds",
    "bytes_read",
    "bytes_stored",
    "reads",
    "read_sizes",
    "row_groups_skipped",
    "op_seconds",
    "counts",
    "cache",
    "peak_rss_mb",
    "peak_bytes",
    "restarts",
    "quarantined_rows",
]
INLINE = {"preprocessing.executor": "inline"}


@pytest.fixture(scope="module")
def epoch(smoke: dict[str, Any], home: Path, plainly: Any) -> dict[str, Any]:
    """The undisturbed result of one process."""
    with plainly(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(home))
        result: dict[str, Any] = preprocess(config=CONFIG, overrides=INLINE)
    return result


@pytest.fixture
def files(home: Path) -> list[Path]:
    """The data files of the training days."""
    return files_of(home, "smoke", "2025-01-06", "2025-01-07")


def global_batch(shares: tuple[Batch, ...]) -> list[np.ndarray]:
    """Returns dense values, labels, weights, lengths and ids of a batch, joined from the shares of all ranks."""
    kept = [share.weights.numpy() > 0 for share in shares]
    whole = [
        np.concatenate([getattr(share, name).numpy()[rows] for share, rows in zip(shares, kept, strict=True)])
        for name in ("dense", "labels", "weights")
    ]
    features = list(shares[0].sparse.keys())
    lengths = [
        share.sparse.lengths().numpy().reshape(len(features), -1)[:, rows]
        for share, rows in zip(shares, kept, strict=True)
    ]
    ids = [share.sparse[name].values().numpy() for name in features for share in shares]  # padding has no weight
    return [*whole, np.concatenate(lengths, axis=1), np.concatenate(ids)]


def order_hash(config: RunConfig, epoch: int) -> str:
    """Returns the SHA-256 over the global batches, from the shares of two ranks."""
    _, spec, _ = prepare_rows(Workspace(config), None)
    clients = [
        Client(
            InlineSource({"x": spec}, config.preprocessing), ("x", spec), config.training.batch_rows, config.seed,
            config.preprocessing.shuffle_window_rows, rank, world_size=2,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    found = hashlib.sha256()
    for shares in zip(*(client.batches(Position(epoch=epoch)) for client in clients), strict=True):
        for array in global_batch(shares):
            found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def test_the_result_has_what_scripts_rely_on(epoch: dict[str, Any], smoke: dict[str, Any], at_home: Path) -> None:
    assert list(epoch) == KEYS
    assert (epoch["status"], epoch["executor"], epoch["workers"]) == ("ok", "inline", 1)
    assert epoch["snapshot_id"] == smoke["snapshot_id"]
    version = open_smoke().tracking.client.get_model_version("smoke", "1")
    assert epoch["plan_hash"] == version.tags["plan_hash"]
    assert (epoch["restarts"], epoch["quarantined_rows"]) == (0, 0)
    assert epoch["rows_per_second"] == pytest.approx(epoch["rows"] / epoch["seconds"])
    parts = [epoch[f"{part}_seconds"] for part in ("read", "transform", "batch")]
    assert min(parts) > 0
    assert epoch["transform_ratio"] == pytest.approx(sum(parts) / parts[0])
    assert epoch["peak_bytes"] > 0
    json.dumps(epoch, allow_nan=False)


def test_rows_bytes_and_nulls_agree_with_the_files(epoch: dict[str, Any], files: list[Path], at_home: Path) -> None:
    config = load(CONFIG)
    dense = {name for group in config.features.dense for name in group.columns}
    metadata = [pq.ParquetFile(file).metadata for file in files]
    chunks = [
        group.column(i)
        for footer in metadata
        for group in map(footer.row_group, range(footer.num_row_groups))
        for i in range(group.num_columns)
    ]
    wanted = [
        chunk.total_compressed_size
        for chunk in chunks
        if (name := chunk.path_in_schema.split(".")[0]) in dense | {"label"} or name.startswith(("cat_", "list_"))
    ]
    assert epoch["rows"] == sum(footer.num_rows for footer in metadata) == 10_000
    assert epoch["batches"] == -(-10_000 // config.training.batch_rows)
    assert epoch["bytes_stored"] == sum(chunk.total_compressed_size for chunk in chunks)
    assert epoch["bytes_read"] == sum(wanted) < epoch["bytes_stored"]
    qualities = [pq.ParquetFile(file).read(columns=["num_quality"])["num_quality"] for file in files]
    assert epoch["counts"]["fill_null num_quality"] == sum(column.null_count for column in qualities) > 0


def test_each_op_of_the_plan_has_its_time(epoch: dict[str, Any]) -> None:
    features = load(CONFIG).features
    kinds = {op.kind for group in (*features.dense, *features.sparse) for op in group.transforms}
    assert epoch["op_seconds"].keys() >= {"arrow"}
    assert {kind for name in epoch["op_seconds"] for kind in name.split("+")} == kinds | {"arrow"}
    assert all(seconds > 0 for seconds in epoch["op_seconds"].values())
    assert sum(epoch["op_seconds"].values()) <= epoch["transform_seconds"] * 1.05


@pytest.mark.parametrize("over", [{}, {"seed": 2}, {"epoch": 1}], ids=str)
def test_the_order_hash_is_that_of_the_batches(
    epoch: dict[str, Any], at_home: Path, plain: None, over: dict[str, int]
) -> None:
    config = load(CONFIG, INLINE | {key: value for key, value in over.items() if key != "epoch"})
    found = preprocess(config=config, epoch=over.get("epoch", 0)) if over else epoch
    assert found["order_hash"] == order_hash(config, over.get("epoch", 0))
    assert found["rows"] == 10_000
    assert (found["order_hash"] == epoch["order_hash"]) == (not over)


@pytest.mark.parametrize(("executor", "workers"), [("process", 1), ("process", 2)])
def test_the_order_is_the_same_wherever_workers_run(
    epoch: dict[str, Any], command: Callable[..., Any], home: Path, executor: str, workers: int
) -> None:
    words = [f"preprocessing.executor={executor}", f"preprocessing.workers={workers}"]
    code, result, log = command(preprocess, CONFIG, *words, home=home)
    assert (code, list(result)) == (0, KEYS)
    same = ("order_hash", "rows", "batches", "snapshot_id", "plan_hash", "bytes_read", "bytes_stored", "counts")
    assert {key: result[key] for key in same} == {key: epoch[key] for key in same}
    assert (result["executor"], result["workers"], result["restarts"]) == (executor, workers, 0)
    assert 1 <= len(result["peak_rss_mb"]) <= workers
    assert f"process ids in {home / 'preprocessing' / 'smoke' / WORKERS_FILE}" in log


def test_the_workers_file_names_the_live_ones(at_home: Path, tmp_path: Path, epoch: dict[str, Any]) -> None:
    config = load(CONFIG, {"preprocessing.workers": 1})
    _, spec, _ = prepare_rows(Workspace(config), None)
    seen: list[psutil.Process] = []

    def look(rows: int, totals: object) -> None:
        pids = json.loads((tmp_path / WORKERS_FILE).read_text(encoding="utf-8"))
        assert list(pids) == ["1"]
        process = psutil.Process(pids["1"])
        assert os.getpid() in [parent.pid for parent in process.parents()]
        assert process.name() == "dlrm worker 1"
        seen.append(process)

    drained = drain(
        spec, config.preprocessing, config.training.batch_rows, config.seed, tmp_path, warn=pytest.fail, progress=look
    )
    assert len(seen) == drained.batches == epoch["batches"]
    assert drained.order_hash == epoch["order_hash"]
    assert not any(process.is_running() for process in set(seen))
    assert json.loads((tmp_path / WORKERS_FILE).read_text(encoding="utf-8")) == {}


def test_a_second_process_is_refused(at_home: Path, command: Callable[..., Any]) -> None:
    folder = at_home / "preprocessing" / "smoke"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        code, result, _ = command(preprocess, CONFIG, "preprocessing.executor=inline", home=at_home)
    assert (code, result) == (
        1,
        {
            "status": "failed",
            "error": "run folder 'smoke' is in use by another process. Wait for it or stop it.",
        },
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["preprocessing.executor=thread"], "configs/smoke.yaml, key 'preprocessing.executor': expected 'inline', 'process' or 'ray', got 'thread'. Correct the value."),
        (["epoch=-1"], "argument 'epoch': expected greater than or equal to 0, got -1. Correct the value."),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_before_anything_runs(
    command: Callable[..., Any], tmp_path: Path, words: list[str], sentence: str
) -> None:
    code, result, log = command(preprocess, CONFIG, *words, home=tmp_path)
    assert (code, result) == (1, {"status": "failed", "error": sentence})
    assert log.strip().splitlines() == [f"error: {sentence}"]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_ray_is_named(at_home: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it now raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "pipeline.preprocessing.ray_executor", raising=False)
    code, result, log = command(preprocess, CONFIG, "preprocessing.executor=ray", home=at_home)
    assert (code, result) == (
        1,
        {
            "status": "failed",
            "error": "preprocessing.executor 'ray': expected Ray to be installed, got no module of that name. "
            "Install it: make setup EXTRAS=ray.",
        },
    )
    assert "Traceback" not in log


# -- disturbed from outside -------------------------------------------------------------------------------------------

LONG = {
    "source.generator.rows_per_day": 40_000,
    "warehouse.row_group_rows": 500,
    "preprocessing.split_rows": 1,
    "preprocessing.shuffle_window_rows": 2_000,
    "preprocessing.workers": 2,
}
"""An epoch of 160 splits. It takes seconds."""
LONG_WORDS = [f"{key}={value}" for key, value in LONG.items()]


@pytest.fixture(scope="module")
def long_home(plainly: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A warehouse with an epoch that is long enough to disturb."""
    folder = tmp_path_factory.mktemp("long")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(folder))
        with plainly():  # not during the tests: the smoke run may begin meanwhile
            ingest(config=CONFIG, overrides=LONG)
        yield folder


@pytest.fixture
def workers(long_home: Path) -> "Workers":
    return Workers(long_home)


class Workers:
    """The workers of an epoch in a home."""

    def __init__(self, home: Path) -> None:
        self.note = home / "preprocessing" / "smoke" / WORKERS_FILE
        self.note.unlink(missing_ok=True)

    def pids(self) -> set[int]:
        return set(json.loads(self.note.read_text(encoding="utf-8")).values()) if self.note.exists() else set()

    def new(self, known: set[int]) -> int:
        """Waits for a worker that is new and ready. The epoch has started by then."""
        end = time.monotonic() + 400
        while not (new := self.pids() - known):
            assert time.monotonic() < end, "no worker came"
            time.sleep(0.005)
        return min(new)


@pytest.fixture
def started(long_home: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -m flows.preprocess` in its own process group. It starts a Prefect server."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.preprocess", CONFIG, *LONG_WORDS],
        cwd=ROOT, env=outside | {"DLRM_HOME": str(long_home)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    yield process
    if process.poll() is None:
        process.kill()
        process.communicate()


INTERRUPTED = {"status": "failed", "error": "interrupted; run the same command again to go on."}


@pytest.mark.nightly
def test_an_interrupted_epoch_leaves_nothing(workers: Workers, started: subprocess.Popen[str]) -> None:
    workers.new(set())
    family = psutil.Process(started.pid).children(recursive=True)
    assert any(process.name().startswith("dlrm worker") for process in family)
    os.killpg(started.pid, signal.SIGINT)  # as Ctrl-C does: a terminal signals workers, too
    out, log = started.communicate(timeout=400)
    assert (started.returncode, json.loads(out.strip().splitlines()[-1])) == (130, INTERRUPTED), log
    assert log.splitlines().count(f"error: {INTERRUPTED['error']}") == 1
    for noise in ("Traceback", "replacing worker", "temporary server"):
        assert noise not in log
    assert psutil.wait_procs(family, timeout=15)[1] == []
    assert workers.pids() == set()


@pytest.mark.nightly
def test_sigterm_ends_an_epoch_and_its_workers(long_home: Path, workers: Workers, command: Callable[..., Any]) -> None:
    def end() -> psutil.Process:
        worker = psutil.Process(workers.new(set()))
        os.kill(os.getpid(), signal.SIGTERM)
        return worker

    before = signal.getsignal(signal.SIGTERM)
    try:
        with ThreadPoolExecutor(1) as other:
            worker = other.submit(end)
            code, result, log = command(preprocess, CONFIG, *LONG_WORDS, home=long_home)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, result, "Traceback" in log) == (130, INTERRUPTED, False), log
    assert psutil.wait_procs([worker.result()], timeout=15)[1] == []
    assert workers.pids() == set()


@pytest.mark.slow
def test_killed_workers_do_not_change_the_order(
    long_home: Path, plain: None, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_two() -> None:
        seen: set[int] = set()
        for _ in range(2):
            seen.add(worker := workers.new(seen))
            os.kill(worker, signal.SIGKILL)

    monkeypatch.setenv("DLRM_HOME", str(long_home))
    with ThreadPoolExecutor(1) as other:
        killed = other.submit(kill_two)
        result = preprocess(config=CONFIG, overrides=LONG)
        killed.result()
    assert result["restarts"] >= 1
    assert caplog.text.count("replacing worker") == result["restarts"]
    undisturbed = preprocess(config=CONFIG, overrides=LONG | {"preprocessing.workers": 1} | INLINE)
    assert result["order_hash"] == undisturbed["order_hash"]
    assert result["rows"] == undisturbed["rows"] == 80_000
    assert undisturbed["restarts"] == 0


@pytest.mark.nightly
def test_too_few_open_files_are_named(long_home: Path, prefect: str) -> None:
    """Each split in memory takes one. Here all 160 are shuffled together. The limit is one of a whole process."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    outside |= {"DLRM_HOME": str(long_home), "PREFECT_API_URL": prefect}
    words = [*LONG_WORDS, "preprocessing.shuffle_window_rows=100000"]
    done = subprocess.run(
        ["prlimit", "--nofile=100", sys.executable, "-m", "flows.preprocess", CONFIG, *words],
        cwd=ROOT, env=outside, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    code, result, log = done.returncode, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr
    assert (code, result) == (
        1,
        {
            "status": "failed",
            "error": "open files of the preprocessing: expected fewer than the system's limit, got as many. "
            "Raise the limit (ulimit -n), or raise preprocessing.split_rows.",
        },
    ), log
    assert "Traceback" not in log
