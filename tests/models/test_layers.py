"""Layers against their formulas, written down independently."""

import pytest
import torch

from models.layers import CatInteraction, CrossInteraction, DotInteraction, mlp


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))


def test_dot_appends_every_pair_once_to_the_dense_vector(features: torch.Tensor) -> None:
    layer = DotInteraction(num_features=4, width=3)
    rows = []
    for vectors in features:
        pairs = [sum(vectors[i] * vectors[j]) for i in range(4) for j in range(i + 1, 4)]
        rows.append(torch.cat([vectors[0], torch.stack(pairs)]))
    torch.testing.assert_close(layer(features), torch.stack(rows))
    assert layer.width_out == 3 + 6
    assert not layer.state_dict()  # it adds nothing to a saved model


def test_dot_has_the_gradient_of_its_formula(features: torch.Tensor) -> None:
    """Its backward pass is written by hand."""
    layer, given = DotInteraction(num_features=4, width=3), torch.arange(1.0, 10.0)
    ours, theirs = features.clone().requires_grad_(), features.clone().requires_grad_()
    (layer(ours) * given).sum().backward()
    rows, columns = torch.triu_indices(4, 4, offset=1)
    pairs = (theirs[:, rows] * theirs[:, columns]).sum(dim=2)
    (torch.cat([theirs[:, 0], pairs], dim=1) * given).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_dot_needs_a_pair() -> None:
    with pytest.raises(ValueError, match="a dot interaction needs at least 2 vectors, got 1"):
        DotInteraction(1, 8)


def test_cat_concatenates(features: torch.Tensor) -> None:
    layer = CatInteraction(4, 3)
    assert layer(features).equal(torch.stack([torch.cat(list(vectors)) for vectors in features]))
    assert layer.width_out == 12


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_follows_the_formula(features: torch.Tensor, rank: int | None) -> None:
    torch.manual_seed(2)
    layer = CrossInteraction(4, 3, layers=3, rank=rank)
    values: dict[str, torch.Tensor] = dict(layer.named_parameters())
    for value in values.values():  # biases start at zero, which would hide them
        torch.nn.init.normal_(value, std=0.3)
    first = expected = features.flatten(1)
    for i in range(3):
        if rank is None:
            weight = values[f"cross.kernels.{i}"]
        else:
            weight = values[f"cross.W_kernels.{i}"] @ values[f"cross.V_kernels.{i}"]
        expected = first * (expected @ weight.T + values[f"cross.bias.{i}"].flatten()) + expected
    torch.testing.assert_close(layer(features), expected)
    assert layer.width_out == 12


def test_mlp_is_linear_then_relu() -> None:
    torch.manual_seed(3)
    layers = mlp(3, [8, 4])
    inputs = torch.randn(6, 3)
    expected = inputs
    for linear in (layers[0], layers[2]):
        expected = (expected @ linear.weight.T + linear.bias).clamp(min=0.0)
    torch.testing.assert_close(layers(inputs), expected)


def test_mlp_drops_units_in_training_only() -> None:
    torch.manual_seed(4)
    layers = mlp(3, [512], dropout=0.5)
    inputs = torch.ones(1, 3)
    kept = layers.eval()(inputs)
    dropped = layers.train()(inputs)
    alive = dropped != 0.0
    torch.testing.assert_close(dropped[alive], 2.0 * kept[alive])
    assert 0.35 < 1.0 - alive.sum() / (kept != 0.0).sum() < 0.65
