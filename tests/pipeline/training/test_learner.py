"""The mean of the weights."""

from pathlib import Path

import pytest
import torch

from pipeline.training.state import checkpoint
from tests.pipeline.training.loops import PLACES, Maker, same, scripted, weights_of


@PLACES
@pytest.mark.parametrize("validated", [True, False])
def test_the_exported_weights_are_the_mean_over_steps(
    make_trainer: Maker, tmp_path: Path, validated: bool, place: dict[str, str]
) -> None:
    on_the_way = []
    for step in (4, 6, 8):
        plain, _ = make_trainer(max_steps=step)
        plain.train()
        on_the_way.append(weights_of(plain))
        (tmp_path / "checkpoints").rename(tmp_path / f"checkpoints {step}")
    seen: list[dict[str, torch.Tensor]] = []
    validate = scripted([0.5], seen) if validated else None
    averaged, _ = make_trainer(validate, max_steps=8, average_from_step=4, average_every_steps=2, **place)
    averaged.train()
    found = weights_of(averaged)
    for name, value in found.items():
        expected = torch.stack([weights[name].double() for weights in on_the_way]).mean(0)
        assert torch.allclose(value.double(), expected, atol=1e-6)
    assert not validated or same(found, seen[0])


@PLACES
def test_averaging_does_not_disturb_training(make_trainer: Maker, tmp_path: Path, place: dict[str, str]) -> None:
    plain, _ = make_trainer(max_steps=8, **place)
    plain.train()
    weights = weights_of(plain)
    (tmp_path / "checkpoints").rename(tmp_path / "plain")
    averaged, _ = make_trainer(
        scripted([0.5, 0.4, 0.6, 0.7]), max_steps=8, average_from_step=2, average_every_steps=2, validate_every_steps=2,
        **place,
    )  # fmt: skip
    averaged.train()
    newest = checkpoint.find_latest(tmp_path / "checkpoints")
    assert newest is not None
    averaged.restore.load(averaged.learner, newest)
    assert same(weights_of(averaged), weights)
