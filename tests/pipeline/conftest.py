"""A small warehouse with known rows, and the specs to train on it."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.data.selection import Selection
from pipeline.jobs.training.rank.main import train
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec, fit_plan
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.transforms.ops.dense import Clamp, FillNull, Standardise
from pipeline.transforms.ops.sparse import SigridHash
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from tests.sharing import once

ROOT = Path(__file__).resolve().parents[2]
DAYS = tuple(datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(4))
ROWS = (720, 700, 661, 400)
"""Three days to train on. Their 2,081 rows are 13 batches of 160 and one more row, too few for two ranks to share."""
CONFIG = WarehouseConfig(row_group_rows=100, file_rows=300)


def make_day(number: int) -> pa.Table:
    """Returns the rows of a day. `row` numbers them over all days, and so does `share`, in a form exact in float32."""
    random = np.random.default_rng(number)
    count = ROWS[number]
    row = np.arange(count) + sum(ROWS[:number])
    a, user = random.normal(2.0, 3.0, count), random.integers(0, 40, count)
    items = [random.integers(0, 200, n) for n in random.integers(0, 4, count)]
    truth = 1.0 / (1.0 + np.exp(1.5 - 0.4 * (a - 2.0) - 1.5 * (user % 3 == 0)))
    return pa.table(
        {
            "day": pa.array([DAYS[number]] * count, pa.date32()),
            "row": row,
            "share": row / 4096.0,
            "num_a": pa.array(a, mask=random.random(count) < 0.1),
            "num_b": random.exponential(2.0, count),
            "cat_user": user,
            "list_items": pa.array(items, pa.list_(pa.int64())),
            "label": (random.random(count) < truth).astype(np.int64),
        }
    )


@pytest.fixture(scope="session")
def days() -> list[pa.Table]:
    return [make_day(number) for number in range(len(DAYS))]


@pytest.fixture(scope="session")
def make_warehouse() -> Callable[[Path, list[pa.Table]], DataSpec]:
    """(folder, days) -> all their rows under a plan that keeps the row's number readable in dense column 0."""

    def make(home: Path, tables: list[pa.Table]) -> DataSpec:
        warehouse = Warehouse(CONFIG, home)
        whole = pa.concat_tables(tables)
        names = {day: f"day {i}" for i, day in enumerate(DAYS[: len(tables)])}
        snapshot = replace_days(
            warehouse, "t", names, whole.schema, whole.to_batches(max_chunksize=100), whole.num_rows
        )
        features = FeatureSchema(
            dense=(
                DenseGroup(columns=("share",), transforms=()),
                DenseGroup(columns=("num_*",), transforms=(Standardise(), FillNull())),
            ),
            sparse=(
                SparseGroup(columns=("cat_user",), transforms=(Clamp(low=0, high=49),)),
                SparseGroup(columns=("list_items",), transforms=(SigridHash(size=83),), pooling="mean"),
            ),
        )
        spec = DataSpec(
            warehouse=CONFIG, home=str(home), snapshot=snapshot, selection=Selection(days=DAYS[: len(tables)]),
            plan=build_plan(features, whole.schema), label="label",
        )  # fmt: skip
        return spec.model_copy(update={"plan": fit_plan(spec, warehouse)})

    return make


@pytest.fixture(scope="session")
def data(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], tmp_path_factory: pytest.TempPathFactory
) -> DataSpec:
    """All four days."""
    return make_warehouse(tmp_path_factory.mktemp("warehouse"), days)


@pytest.fixture(scope="session")
def rank_spec(data: DataSpec) -> Callable[..., RankSpec]:
    """(folder, **training) -> a spec with three training days and one day for validation and test."""

    def make(folder: Path, **training: Any) -> RankSpec:
        settings = {
            "world_size": 1, "device": os.environ["DLRM_TEST_DEVICE"], "threads_per_rank": 1, "batch_rows": 160, "log_every_steps": 1,
            "sharding": "table_wise", "checkpoint_every_steps": 4, "table_learning_rate": 0.1,
            "dense_learning_rate": 0.02, "dense_weight_decay": 0.01,
        } | training  # fmt: skip
        rows = [data.model_copy(update={"selection": Selection(days=part)}) for part in (DAYS[:3], DAYS[3:], DAYS[3:])]
        return RankSpec(
            train=rows[0], valid=rows[1], probe=rows[2], training=TrainConfig(**settings), seed=11, folder=str(folder),
            model=DLRMConfig(embedding_width=4, bottom_mlp=(8,), top_mlp=(8,)),
            preprocessing=PreprocessingConfig(workers=1, shuffle_window_rows=500),
        )  # fmt: skip

    return make


class Run:
    """The result and the events of a training."""

    def __init__(self, spec: RankSpec, result: Event, events: list[Event]) -> None:
        self.spec, self.result, self.events, self.folder = spec, result, events, Path(spec.folder)
        self.weights = load_file(self.folder / "weights.safetensors")

    @property
    def begun(self) -> Event:
        """What rank 0 says as it begins. On a slow machine, signs of life come before."""
        return next(event for event in self.events if event["event"] == "start")

    def metric(self, name: str) -> dict[int, float]:
        """Step -> value."""
        found = [event for event in self.events if event["event"] == "metrics" and name in event["metrics"]]
        return {event["step"]: event["metrics"][name] for event in found}


def start(spec: RankSpec, on_event: Callable[[Event], object], deadline: int = 250, **limits: Any) -> Event:
    world_size = spec.training.world_size
    limit = Limits(deadline_seconds=deadline, **limits)
    return run_ranks("pipeline.jobs.training.rank.main", spec, Path(spec.folder), world_size, 1, limit, on_event, ROOT)


def completed(spec: RankSpec) -> Run:
    events: list[Event] = []
    return Run(spec, start(spec, events.append), events)


def completed_here(spec: RankSpec, device: torch.device) -> Run:
    """A training of one rank in this process."""
    events: list[Event] = []
    train(spec, 0, device, events.append)
    return Run(spec, events[-1], events)


SETTINGS: dict[str, Any] = {"world_size": 2, "validate_every_steps": 5}


@pytest.fixture(scope="session")
def undisturbed(rank_spec: Callable[..., RankSpec], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, a table on each: one training for all test processes."""

    def make(folder: Path) -> dict[str, Any]:
        run = completed(rank_spec(folder, **SETTINGS))
        return {"spec": run.spec.model_dump_json(), "result": run.result, "events": run.events}

    found = once(tmp_path_factory, "undisturbed", make)[1]
    return Run(RankSpec.model_validate_json(found["spec"]), found["result"], found["events"])


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., tuple[Path, Plan]]:
    """Draws and writes the weights of a model with some features. Returns their file and the plan."""

    def draw(
        features: FeatureSchema, columns: pa.Schema, config: DLRMConfig, spread: float | None = None
    ) -> tuple[Path, Plan]:
        """`spread`: standard deviation of the tables' numbers. None: the model's initialisation."""
        torch.manual_seed(5)
        plan = build_plan(features, columns)
        model = DLRM(config, len(plan.dense), plan.sparse)
        if spread is not None:
            with torch.no_grad():
                for table in model.embeddings.embedding_bags.values():
                    table.weight.normal_(0.0, spread)
        save_file(model.state_dict(), tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors", plan

    return draw
