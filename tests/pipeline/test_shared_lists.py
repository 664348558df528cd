"""Whole trainings on sessions: sharing lists between rows changes neither losses nor weights."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.dataset import DataSpec
from tests.pipeline.conftest import Run, completed, completed_here
from tests.pipeline.preprocessing.reference import in_sessions


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{"world_size": 1}, {"world_size": 2, "sharding": "row_wise"}], ids=str)
def test_shared_lists_give_the_weights_of_separate_lists(
    rank_spec: Callable[..., RankSpec],
    days: list[pa.Table],
    make_warehouse: Callable[[Path, list[pa.Table]], DataSpec],
    device: torch.device,
    tmp_path: Path,
    settings: dict[str, object],
) -> None:
    """28 steps of exact row-wise Adagrad, a table with sum and one with mean pooling, padding, validations."""
    tables = [in_sessions(day, seed) for seed, day in enumerate(days)]
    data = make_warehouse(tmp_path / "home", tables)

    def trained(name: str, features: tuple[str, ...]) -> Run:
        spec = rank_spec(tmp_path / name, epochs=2, validate_every_steps=5, **settings)
        given = {"home": data.home, "snapshot": data.snapshot, "plan": data.plan, "session": "session"}
        parts = {part: getattr(spec, part).model_copy(update=given) for part in ("train", "valid", "probe")}
        for part in ("train", "valid"):
            parts[part] = parts[part].model_copy(update={"deduplicate": features})
        spec = spec.model_copy(update=parts)
        return completed_here(spec, device) if spec.training.world_size == 1 else completed(spec)

    plain, once = trained("plain", ()), trained("once", ("list_items", "cat_user"))
    assert once.result["steps"] == plain.result["steps"] == 28
    for name in ("train_ne_window", "train_loss_window", "valid_ne"):
        assert once.metric(name) == pytest.approx(plain.metric(name), abs=1e-5)
    for name, value in plain.weights.items():
        torch.testing.assert_close(once.weights[name], value, atol=1e-5, rtol=0.0)
