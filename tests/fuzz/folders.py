"""Damaged files of a home. Only their owner may write there, so a disk or a hand has damaged them."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.gate import Verdict
from pipeline.evaluation.metrics import Quality
from pipeline.evaluation.series import BacktestResult
from pipeline.jobs.code_version import CODE, noted_code, trained_by
from pipeline.jobs.recurring.judge import DayVerdict
from pipeline.jobs.search.release import load_result as load_release
from pipeline.jobs.search.sweep import load_result as load_sweep
from pipeline.jobs.search.trials import PINNED, RESULT, SearchJob, find_unfinished
from pipeline.jobs.training.evaluate import EvaluationResult
from pipeline.jobs.training.finish import EVALUATED, load_evaluation
from pipeline.jobs.training.job import JOB, PLAN, RUN_ID, SNAPSHOT, TrainingJob, find_begun, registered_model
from pipeline.jobs.training.provenance import RECORD, Record
from pipeline.jobs.training.register import load_job
from pipeline.jobs.training.train import TRAINED, TrainingResult
from pipeline.preprocessing.quarantine import QUARANTINE_FILE, read_quarantine
from pipeline.registration.journal import POINTS, SENT, Journal
from pipeline.transforms.plan.plan import Plan
from storage.artifacts import MADE_AGAIN, read_line, read_note
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.fuzz.harness import Case, require
from tests.fuzz.launch import SUMMARY, TABLE, VERSION
from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.service import make_spec

LOST = {"epoch": 0, "path": "p", "row_group": 1, "rows": 3, "day": "2024-01-02", "data": "train", "reason": "r"}
POINT = {"step": 3, "time": 1_700_000_000_000, "metrics": {"train_ne_window": 0.9, "valid_ne": 0.8}}


@contextmanager
def run_folder(folder: Path) -> Iterator[Case]:
    """Files of trainings, searches and backtests."""
    spec = make_spec(folder)
    warehouse = Warehouse(WarehouseConfig(), folder / "home")
    run = folder / "runs" / "fuzz-0"
    run.mkdir(parents=True)
    job = TrainingJob(
        identity="i", snapshot=spec.snapshot, folder=str(run), done=None,
        data=dict.fromkeys(("train", "test"), spec.model_copy(update={"rows": 40})),
    )  # fmt: skip
    record = Record(
        identity="i", snapshot=spec.snapshot, snapshot_tag="train-1", config={"name": "x"}, seeds={"seed": 1},
        plan_hash=spec.plan.hash, placement=(), world_size=1, threads_per_rank=1, device="cpu", commit="c",
        lock_hash="l", versions={"torch": "2"}, weights_sha256="w",
    )  # fmt: skip
    quality = Quality.model_validate(dict.fromkeys(Quality.model_fields) | {"rows": 1, "undefined": {}})
    report = EvalReport(
        overall=quality, slices=(), calibration=(), roc=(), precision_recall=(), ne_floor=None, ne_exact=None,
        grouped=None,
    )  # fmt: skip
    verdict = Verdict(decision="hold", reason="r")
    trained = TrainingResult(weights="w", probe=(0.5,), summary=SUMMARY, placement=(TABLE,))
    search = SearchJob(identity="i", folder=str(run), snapshot=spec.snapshot)
    days = {"day": "2024-01-02", "challenger": 2, "champion": 1, "gate": verdict.model_dump(), "quality": {}}
    backtest = {
        "name": "b",
        "days": [],
        "rows_trained": {"2024-01-02": 3.0},
        "seconds": 1.0,
        "trainings": {"incremental": 1},
    }
    released = {"status": "other", "model": {"name": "m", "version": 1}, "model_run_id": "r"}
    swept = {"trials": {"done": 3}, "config_path": "/no/file"}
    workspace: Any = SimpleNamespace(
        config=SimpleNamespace(sweep=SimpleNamespace(trials=1, space={}, strategy="random")),
        console=SimpleNamespace(log=logging.getLogger("tests.fuzz")),
        warehouse=warehouse,
        fetch_note=Path.exists,
    )

    readers: dict[str, tuple[Any, Callable[[], object]]] = {
        RECORD: (record.model_dump(mode="json"), lambda: read_note(run / RECORD, Record)),
        JOB: (job.model_dump(mode="json"), lambda: require(load_job(workspace, run, record).folder == str(run), "its folder")),
        TRAINED: (trained.model_dump(mode="json"), lambda: read_note(run / TRAINED, TrainingResult)),
        EVALUATED: (
            EvaluationResult(report=report, gate=verdict, weights_sha256="w").model_dump(mode="json"),
            lambda: load_evaluation(run, trained),
        ),
        SNAPSHOT: (spec.snapshot.model_dump(mode="json"), lambda: find_begun(workspace, run)),
        PLAN: (spec.plan.model_dump(mode="json"), lambda: read_note(run / PLAN, Plan)),
        CODE: ([VERSION.model_dump()], lambda: (noted_code(run), trained_by(run))),
        RUN_ID: ("0" * 32, lambda: read_line(run / RUN_ID)),
        "registered": ("m 1", lambda: registered_model(run)),
        PINNED: (search.model_dump(mode="json"), lambda: find_unfinished(search)),
        "judged.json": (days, lambda: read_note(run / "judged.json", DayVerdict, MADE_AGAIN)),
        "backtest.json": (backtest, lambda: read_note(run / "backtest.json", BacktestResult, MADE_AGAIN)),
        "release": (released, lambda: load_release(workspace, search)),
        "sweep": (swept, lambda: load_sweep(workspace, search)),
    }  # fmt: skip

    def case(random: Random) -> None:
        name = random.choice(list(readers))
        value, read = readers[name]
        path = run / (RESULT if name in ("release", "sweep") else name)
        path.write_bytes(mutate_json(random, value))
        try:
            read()
        finally:
            path.unlink()

    yield case
    shutil.rmtree(run)


@contextmanager
def lines(folder: Path) -> Iterator[Case]:
    """Files to which lines are added: metrics on their way to MLflow, and quarantined row groups."""

    def case(random: Random) -> None:
        if random.random() < 0.4:
            content = mutate_json(random, LOST) if random.random() < 0.5 else json.dumps(LOST).encode()
            (folder / QUARANTINE_FILE).write_bytes(mutate_bytes(random, content + b"\n" + content + b"\n"))
            require(all(one["rows"] >= 0 for one in read_quarantine(folder)), "rows")
            return
        written = [json.dumps(POINT | {"step": step}).encode() for step in range(3)]
        damaged = [mutate_json(random, POINT).replace(b"\n", b" ") if random.random() < 0.3 else one for one in written]
        (folder / POINTS).write_bytes(b"".join(line + b"\n" for line in damaged))
        if random.random() < 0.3:
            (folder / POINTS).write_bytes(mutate_bytes(random, (folder / POINTS).read_bytes()))
        note = {"run_id": "r", "bytes": len(damaged[0]) + 1}
        whole = random.random() < 0.5
        (folder / SENT).write_bytes(json.dumps(note).encode() if whole else mutate_json(random, note))
        tracker: Any = SimpleNamespace(client=SimpleNamespace(log_batch=lambda run_id, metrics: sent.extend(metrics)))
        sent: list[Any] = []
        journal = Journal(tracker, "r", folder, lambda text: None)
        journal.log(99, {"last": 0.7})
        journal.deliver()
        require((sent[-1].step, sent[-1].value) == (99, 0.7), "the last point did not arrive")
        if (
            whole
            and damaged == written
            and (folder / POINTS).read_bytes().startswith(b"".join(one + b"\n" for one in written))
        ):
            require({one.step for one in sent} >= {1, 2}, "points that had not arrived are left out")

    yield case
