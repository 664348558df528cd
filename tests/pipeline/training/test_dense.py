"""The faster modules of the dense part against float64 and against what they replace."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.layers import DotInteraction, mlp
from pipeline.training import interaction
from pipeline.training.dense import (
    OneDnnLinear,
    ReluInPlace,
    gains_from_onednn,
    lacks_bf16,
    use_cpu_layers,
)
from pipeline.training.interaction import NumbaDots
from pipeline.training.tables.simd import TILE_ROWS, VECTOR, multiply_narrow_tile, multiply_tile
from storage.compiled import compiled


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dots_of(pieces):
    """The definition, in float64, pair by pair."""
    vectors = torch.cat([piece.double() for piece in pieces], 1)
    count = vectors.shape[1]
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(count) for j in range(i + 1, count)]
    return torch.cat([vectors[:, 0], torch.stack(pairs, 1)], 1)


@pytest.mark.parametrize(
    ("counts", "width"),
    [((2,), 1), ((1, 1), 3), ((1, 4), 16), ((1, 5), 17), ((1, 26), 64), ((7,), 32), ((1, 14, 3), 10), ((1, 33), 48)],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_dots_and_their_gradients_are_those_of_the_definition(counts, width, rows):
    pieces = [draw(rows, count, width, seed=n).requires_grad_() for n, count in enumerate(counts)]
    exact = [piece.detach().double().requires_grad_() for piece in pieces]
    dots = NumbaDots(DotInteraction(sum(counts), width))

    out, expected = dots(*pieces), dots_of(exact)
    gradient = draw(*out.shape, seed=9)
    out.backward(gradient)
    expected.backward(gradient.double())

    torch.testing.assert_close(out, expected.float())
    for piece, one in zip(pieces, exact, strict=True):
        torch.testing.assert_close(piece.grad, one.grad.float())


def test_tiles_of_both_widths_have_the_same_bits():
    """A processor takes one of them for all its products."""
    one, other = draw(TILE_ROWS, 9), draw(9, 2 * VECTOR, seed=1)
    wide, narrow = np.empty((2, TILE_ROWS * 2 * VECTOR), np.float32)

    @compiled
    def multiply(one, other, wide, narrow):
        multiply_tile(one, 0, 9, 1, other, 0, 2 * VECTOR, 9, wide, 0, 2 * VECTOR)
        for column in (0, VECTOR):
            multiply_narrow_tile(one, 0, 9, 1, other, column, 2 * VECTOR, 9, narrow, column, 2 * VECTOR)

    multiply(one.numpy().reshape(-1), other.numpy().reshape(-1), wide, narrow)
    assert wide.tobytes() == narrow.tobytes()
    expected = one.double() @ other.double()
    torch.testing.assert_close(torch.from_numpy(wide).view(TILE_ROWS, -1), expected.float())


def test_threads_do_not_change_a_bit_of_the_dots(monkeypatch):
    monkeypatch.setattr(interaction, "WORK_OF_A_THREAD", 1)
    dense, pooled = draw(50, 1, 24, seed=1), draw(50, 9, 24, seed=2)
    dots, found = NumbaDots(DotInteraction(10, 24)), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        inputs = [dense.clone().requires_grad_(), pooled.clone().requires_grad_()]
        out = dots(*inputs)
        out.backward(draw(*out.shape, seed=3))
        found.append([out.detach(), inputs[0].grad, inputs[1].grad])
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def test_dots_take_pieces_that_lie_apart_and_of_two_types():
    dense = draw(6, 2, 8, seed=1)[:, :1].bfloat16().requires_grad_()
    pooled = draw(6, 8, 5, seed=2).transpose(1, 2).requires_grad_()
    out = NumbaDots(DotInteraction(6, 8))(dense, pooled)
    torch.testing.assert_close(out.double(), dots_of([dense, pooled]), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert (out.dtype, dense.grad.dtype, pooled.grad.shape) == (torch.float32, torch.bfloat16, pooled.shape)


def test_dots_of_no_rows():
    assert NumbaDots(DotInteraction(3, 4))(torch.zeros(0, 1, 4), torch.zeros(0, 2, 4)).shape == (0, 7)


onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@onednn
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 13, 5), (7, 415, 33), (300, 64, 1)])
def test_a_layer_of_onednn_is_the_linear_layer(rows, inputs, outputs):
    plain = nn.Linear(inputs, outputs)
    values = draw(rows, inputs).requires_grad_()
    exact = values.detach().double().requires_grad_()
    weight, bias = (parameter.detach().double().requires_grad_() for parameter in plain.parameters())

    out = OneDnnLinear(plain)(values)
    expected = F.linear(exact, weight, bias)
    gradient = draw(rows, outputs, seed=1)
    out.backward(gradient)
    expected.backward(gradient.double())

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out, expected.float(), **close)
    for found, one in [(values, exact), (plain.weight, weight), (plain.bias, bias)]:
        torch.testing.assert_close(found.grad, one.grad.float(), **close)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("number_type", [torch.float32, torch.bfloat16])
def test_an_mlp_with_relu_in_place_has_the_same_bits(rows, dropout, number_type):
    """Also if its result is used twice, and if its gradient is a part of a wider one, which stays as it is."""
    plain, layers = (mlp(13, [8, 4], dropout).to(number_type) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    use_cpu_layers(layers, onednn=False)
    values, gradient = draw(rows, 13).to(number_type), draw(rows, 12, seed=1).to(number_type)
    before = gradient.clone()
    for join in (lambda out, _: [out], lambda out, rest: [rest[:, :8], out], lambda out, rest: [out, out, rest[:, :4]]):
        found = []
        for one in (plain, layers):
            torch.manual_seed(1)
            one.zero_grad()
            inputs = values.clone().requires_grad_()
            out = one(inputs)
            joined = torch.cat(join(out, inputs), 1)
            joined.backward(gradient[:, : joined.shape[1]])
            found.append([out.detach(), inputs.grad, *(parameter.grad for parameter in one.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert gradient.equal(before)


def test_relu_in_place_has_the_same_bits_at_its_edge():
    """With NaN, infinities and zeros of both signs."""
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 2.0])
    found = []
    for relu in (nn.ReLU(), ReluInPlace()):
        values = odd.clone().requires_grad_()
        out = relu(values * 1)
        out.backward(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, -0.0, 7.0, float("nan")]))
        found.append([out.detach().numpy().tobytes(), values.grad.numpy().tobytes()])
    assert found[0] == found[1]


@onednn
def test_a_layer_of_onednn_can_stand_before_relu_in_place():
    plain, layers = (mlp(13, [8, 4]) for _ in range(2))
    layers.load_state_dict(plain.state_dict())
    use_cpu_layers(layers, onednn=True)
    one: nn.Module | torch.Tensor
    for one in (plain, layers):
        one(draw(20, 13)).backward(draw(20, 4, seed=1))
    for one, other in zip(plain.parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@onednn
def test_an_mlp_keeps_its_parameters_names_and_dropout():
    torch.manual_seed(3)
    layers = mlp(13, [8, 4], dropout=0.5)
    names = {name: id(parameter) for name, parameter in layers.named_parameters()}
    values, plain = draw(200, 13), layers.eval()(draw(200, 13))
    use_cpu_layers(layers, onednn=True)
    assert {name: id(parameter) for name, parameter in layers.named_parameters()} == names
    torch.testing.assert_close(layers(values), plain)
    assert (layers.train()(values) == 0).float().mean() > plain.eq(0).float().mean() + 0.05  # still drops some


@onednn
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_hidden(value):
    layers, values = mlp(13, [8, 4]), draw(20, 13)
    use_cpu_layers(layers, onednn=True)
    values[3] = value
    pooled = draw(20, 5, 4)
    pooled[7, 2] = value
    out = NumbaDots(DotInteraction(6, 4))(layers(values).unsqueeze(1), pooled)
    assert sorted(set((~out.isfinite()).nonzero()[:, 0].tolist())) == [3, 7]


@onednn
def test_threads_do_not_change_a_bit_of_a_layer():
    layer, values, found = OneDnnLinear(nn.Linear(415, 512)), draw(1000, 415), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        inputs = values.clone().requires_grad_()
        out = layer(inputs)
        out.backward(torch.ones_like(out))
        found.append([out.detach(), inputs.grad])
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"cpu_name": "AMD EPYC 9554", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC 7713", "avx512_f": False}, False),
        ({"cpu_name": "Intel(R) Xeon(R) Platinum 8481C", "avx512_f": True}, False),
        ({"cpu_name": "Neoverse-V2"}, False),
        ({}, False),
    ],
)
def test_onednn_is_taken_where_mkl_has_no_avx512(processor, expected):
    assert gains_from_onednn(processor) is expected


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"avx512_bw": True, "avx512_bf16": True}, False),  # AMD, Zen 4
        ({"avx512_bw": True, "amx_bf16": True}, False),
        ({"avx2": True, "avx_ne_convert": True}, False),  # Intel, Sierra Forest
        ({"architecture": "aarch64", "bf16": True}, False),
        ({"avx512_bw": True, "avx512_bf16": False, "amx_bf16": False}, True),  # Intel, Ice Lake
        ({}, True),
    ],
)
def test_bf16_needs_an_instruction(processor, expected):
    assert lacks_bf16(processor) is (expected or not torch.backends.mkldnn.is_available())
