"""Weights as a trainer exports them, for any features."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema


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
