"""Incremental training: from a checkpoint, with new features, and day after day in one group of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ContractError
from pipeline.evaluation.policy import Policy
from pipeline.jobs.recurring.backtest_rank import BacktestSpec, replace_plan, select_days
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.state import checkpoint
from pipeline.transforms.plan.carry_over import Start
from pipeline.transforms.plan.plan import Plan
from tests.pipeline.conftest import completed_here

ROOT = Path(__file__).resolve().parents[4]
SCRATCH = {"world_size": 2, "epochs": 2, "validate_every_steps": 2, "average_from_step": 2, "average_every_steps": 2}
INCREMENTAL = {"world_size": 2, "table_learning_rate": 0.05, "dense_learning_rate": 0.01}
Specs = Callable[..., RankSpec]


def run(module: str, spec: Any, folder: Path) -> tuple[Event, list[Event]]:
    events: list[Event] = []
    world_size, limits = spec.training.world_size, Limits(deadline_seconds=250)
    return run_ranks(module, spec, folder, world_size, 1, limits, events.append, ROOT), events


def served(spec: RankSpec) -> Path:
    """Returns the checkpoint that a finished training exported."""
    found = checkpoint.find_served(Path(spec.folder) / "checkpoints")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def first(rank_spec: Specs, tmp_path_factory: pytest.TempPathFactory) -> tuple[RankSpec, Event]:
    """A training from scratch on the first day, with early stopping on that day, and averaged weights."""
    spec = rank_spec(tmp_path_factory.mktemp("first"), **SCRATCH)
    day = spec.train.selection.days[:1]
    spec = spec.model_copy(update={"train": select_days(spec.train, day), "valid": select_days(spec.train, day)})
    return spec, run("pipeline.jobs.training.rank.main", spec, Path(spec.folder))[0]


def incremental(rank_spec: Specs, folder: Path, start: Path, day: int, plan: Plan, **training: Any) -> RankSpec:
    """Returns a training on one day that starts from a checkpoint."""
    spec = rank_spec(folder, **INCREMENTAL | training)
    data = select_days(spec.train, spec.train.selection.days[day : day + 1])
    return spec.model_copy(update={"train": data, "valid": None, "start": Start(checkpoint=str(start), plan=plan)})


@pytest.mark.nightly
def test_a_backtest_makes_the_weights_of_daily_trainings(
    first: tuple[RankSpec, Event], rank_spec: Specs, tmp_path: Path
) -> None:
    """Two days after the first. Ranks that stay alive and ranks that load checkpoints give the same bits."""
    spec, _ = first
    second = incremental(rank_spec, tmp_path / "second", served(spec), 1, spec.train.plan)
    run("pipeline.jobs.training.rank.main", second, tmp_path / "second")
    third = incremental(rank_spec, tmp_path / "third", served(second), 2, spec.train.plan)
    result, _ = run("pipeline.jobs.training.rank.main", third, tmp_path / "third")
    days = rank_spec(tmp_path).train.selection.days
    backtest = BacktestSpec(
        scratch=spec.model_copy(update={"folder": str(tmp_path / "backtest")}),
        incremental=second.training,
        new=spec.train,
        evaluated=spec.train,
        policy=Policy(),
        rows=dict(zip(days, (720, 700, 661), strict=True)),
        first_days=days[:1],
        days=days[1:],
    )
    replayed, events = run("pipeline.jobs.recurring.backtest_rank", backtest, tmp_path / "backtest")
    assert replayed["weights_sha256"] == result["weights_sha256"]
    by_day = [event for event in events if event["event"] == "day"]
    assert [event["decision"]["training"] for event in by_day] == ["scratch", "incremental", "incremental"]
    assert [event["cost"]["rows"] for event in by_day] == [1440, 700, 661]
    assert [event["sums"] and event["sums"]["rows"] for event in by_day] == [None, 700, 661]


@pytest.mark.nightly
def test_a_training_starts_from_what_was_exported(
    first: tuple[RankSpec, Event], rank_spec: Specs, device: torch.device, tmp_path: Path
) -> None:
    """With learning rates near zero the weights stay, while the optimizers' moments grow from the old ones."""
    spec, _ = first
    still = {"table_learning_rate": 1e-30, "dense_learning_rate": 1e-30, "dense_weight_decay": 0.0}
    after = incremental(rank_spec, tmp_path, served(spec), 1, spec.train.plan, **still | {"world_size": 1})
    completed_here(after, device)
    old, new = (load_file(Path(one.folder) / "weights.safetensors") for one in (spec, after))
    assert all(torch.equal(old[name], new[name]) for name in old)
    moments = [checkpoint.read_whole(served(one), "tables/", "dense/") for one in (spec, after)]
    rowwise = "tables/embeddings.embedding_bags.cat_user.weight/cat_user.momentum1"
    assert (moments[1][rowwise] >= moments[0][rowwise]).all()
    assert moments[1][rowwise].sum() > moments[0][rowwise].sum() > 0.0
    steps = [one["dense/logit.bias/step"].item() for one in moments]
    assert steps[1] == steps[0] + 5
    assert checkpoint.read_progress(served(after))["steps_before"] == steps[0]


@pytest.mark.nightly
def test_a_model_with_new_features_keeps_its_predictions(
    first: tuple[RankSpec, Event], rank_spec: Specs, device: torch.device, tmp_path: Path
) -> None:
    """The first model lacks the lists of items. With learning rates near zero both predict the same."""
    spec, _ = first
    plan = spec.train.plan
    fewer = plan.model_copy(update={"sparse": plan.sparse[:1], "ops": tuple(op for op in plan.ops if "list_items" not in op.inputs)})  # fmt: skip
    fewer = Plan.model_validate(fewer.model_dump() | {"raw": {k: v for k, v in plan.raw.items() if k != "list_items"}})
    small = replace_plan(rank_spec(tmp_path / "small", max_steps=3), fewer)
    small = small.model_copy(update={"valid": None})
    completed_here(small, device)
    still = {"table_learning_rate": 1e-30, "dense_learning_rate": 1e-30, "dense_weight_decay": 0.0}
    large = incremental(rank_spec, tmp_path / "large", served(small), 1, fewer, **still)
    _, events = run("pipeline.jobs.training.rank.main", large, tmp_path / "large")
    assert [event["new"] for event in events if event["event"] == "grown"] == [["list_items"]]
    probes = [(tmp_path / name / "probe.json").read_text() for name in ("small", "large")]
    values = [torch.tensor([float(part) for part in text.strip("[]\n ").split(",")]) for text in probes]
    torch.testing.assert_close(values[0], values[1], atol=1e-6, rtol=0.0)
    assert not (tmp_path / "large" / "checkpoints" / "grown").exists()


@pytest.mark.nightly
def test_another_model_is_refused(
    first: tuple[RankSpec, Event], rank_spec: Specs, device: torch.device, tmp_path: Path
) -> None:
    spec, _ = first
    other = incremental(rank_spec, tmp_path, served(spec), 1, spec.train.plan, dense_optimizer="sgd", world_size=1)
    with pytest.raises(ContractError) as refused:
        completed_here(other, device)
    assert str(refused.value).startswith("checkpoint 'best', training.dense_optimizer: expected sgd, got adam.")
