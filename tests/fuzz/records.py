"""Damaged records in MLflow: artifacts of runs, tags of models and of versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import RegistryError
from pipeline.evaluation.config import EvaluationConfig
from pipeline.inference.files import FILES, MODEL, PLAN, WEIGHTS, hash_files
from pipeline.jobs.training.provenance import RECORD, Record, fetch_record
from pipeline.jobs.training.run import read_evaluation
from pipeline.registration.aliases import MOVE, Move, list_moves
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.tracking import CONFIG, RESULT, Tracker
from pipeline.registration.versions import download_packed
from pipeline.training.config import ShardingType
from pipeline.training.tables.plan import (
    PlanRows,
    ShardingPlan,
    TableShard,
    TableSharding,
    check_plan,
    describe_plan,
    sum_per_rank,
)
from pipeline.training.tables.sharding import to_torchrec
from storage.reader import SnapshotRef
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_json


@cache
def _database() -> bytes:
    """Returns a new database of MLflow, which takes seconds to make."""
    with TemporaryDirectory() as folder:
        Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db"), Path(folder), "first")
        return (Path(folder) / "mlflow.db").read_bytes()


def _tracker(folder: Path) -> Tracker:
    (folder / "mlflow.db").write_bytes(_database())
    return Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{folder}/mlflow.db"), folder, "fuzz")


@contextmanager
def artifacts(folder: Path) -> Iterator[Case]:
    """JSON files of runs: result, config and record."""
    tracker = _tracker(folder)
    run_id = tracker.start("run", {}, {}, None)
    record = Record(
        identity="a", snapshot=SnapshotRef(table="t", snapshot_id=1), snapshot_tag="train-1", config={"name": "x"},
        seeds={"seed": 1}, plan_hash="p", placement=(), world_size=1, threads_per_rank=1, device="cpu", commit="c",
        lock_hash="l", versions={"torch": "2"}, weights_sha256="w",
    )  # fmt: skip
    values: dict[str, Any] = {
        RESULT: {"status": "ok", "model": {"name": "m", "version": 1}, "train": {"steps": 3}, "git_commit": "c"},
        CONFIG: {"evaluation": EvaluationConfig().model_dump(mode="json")},
        RECORD: record.model_dump(mode="json"),
    }
    for path, value in values.items():
        tracker.log_json(run_id, value, path)
    tracker.client.create_registered_model("m")
    made = tracker.client.create_model_version("m", folder.as_uri(), tags={"record": f"runs:/{run_id}/{RECORD}"})
    place = Path(urlsplit(tracker.client.get_run(run_id).info.artifact_uri).path)

    def case(random: Random) -> None:
        path = random.choice(list(values))
        (place / path).write_bytes(mutate_json(random, values[path]))
        if path == RESULT:
            require(isinstance(tracker.load_result(run_id), dict), "a result")
        elif path == CONFIG:
            read_evaluation(tracker, run_id)
        else:
            fetch_record(tracker, "m", int(made.version))

    yield case


@contextmanager
def tags(folder: Path) -> Iterator[Case]:
    """Tags of a model and its versions, and the files that they vouch for."""
    tracker = _tracker(folder)
    packed = folder / "stored" / "artifacts" / "model"
    packed.mkdir(parents=True)
    contents = {MODEL: b"{}", PLAN: b"[]", WEIGHTS: bytes(range(256))}
    for name, content in contents.items():
        (packed / name).write_bytes(content)
    hashes = hash_files(packed)
    tracker.client.create_registered_model("m")
    version = int(tracker.client.create_model_version("m", (folder / "stored").as_uri()).version)
    move = Move(time="2024", alias="champion", version=1, previous=None, by="person", reason="r").model_dump(
        mode="json"
    )

    def case(random: Random) -> None:
        text = mutate_json(random, random.choice([hashes, move]))[:4_000].decode(errors="replace").replace("\0", "")
        if random.random() < 0.4:
            tracker.client.set_registered_model_tag("m", f"{MOVE}1", text)
            list_moves(tracker, "m")
            return
        tracker.client.set_model_version_tag("m", str(version), FILES, text)
        name = random.choice(list(contents))
        (packed / name).write_bytes(mutate_bytes(random, contents[name]))
        try:
            found = download_packed(tracker, "m", version, folder / "fetched")
            require(
                {key: (found / key).read_bytes() for key in contents} == contents, "other files than were registered"
            )
        finally:
            (packed / name).write_bytes(contents[name])

    yield case


@contextmanager
def sharding_plans(folder: Path) -> Iterator[Case]:
    """Sharding plans of versions, and their rows in the reports of runs."""
    sizes = {"user": (40, 8), "country": (10, 8), "tags": (50, 8)}
    kinds: dict[str, ShardingType] = {"user": "row_wise", "country": "table_wise", "tags": "column_wise"}
    pieces = {"user": [(0, 0, 0, 20, 8), (1, 20, 0, 20, 8)], "country": [(1, 0, 0, 10, 8)], "tags": [(0, 0, 0, 50, 4), (1, 0, 4, 50, 4)]}  # fmt: skip
    plan = tuple(
        TableSharding(
            table=name, rows=rows, width=width, kind=kinds[name], kernel="fused",
            pieces=tuple(
                TableShard(rank=rank, row=row, column=column, rows=high, columns=wide, bytes=9, milliseconds=0.1)
                for rank, row, column, high, wide in pieces[name]
            ),
        )
        for name, (rows, width) in sizes.items()
    )  # fmt: skip
    read, read_rows = TypeAdapter(ShardingPlan), TypeAdapter(PlanRows)
    values, described = read.dump_python(plan, mode="json"), describe_plan(plan)
    check_plan(plan, sizes, 2, "plan")

    def case(random: Random) -> None:
        try:
            if random.random() < 0.4:
                found = read_rows.validate_json(mutate_json(random, described))
                sum_per_rank(
                    list(map(dict, found)), "bytes", 1 + max((max(row["ranks"], default=0) for row in found), default=0)
                )
                return
            stored = read.validate_json(mutate_json(random, values))
        except ValidationError:
            raise RegistryError("plan", "a plan", "another", "Train again.") from None
        check_plan(stored, sizes, 2, "plan")
        to_torchrec(stored, torch.device("cpu"))
        area = sum(piece.rows * piece.columns for table in stored for piece in table.pieces)
        require(area == sum(rows * width for rows, width in sizes.values()), "a part of a table")

    yield case
