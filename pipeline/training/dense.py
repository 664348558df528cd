"""Faster modules for the dense part of a model that trains on CPU. Parameters and their names stay the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.dlrm import DLRM
from models.layers import DotInteraction
from pipeline.training.interaction import NumbaDots
from pipeline.training.tables.torch_private import multiply_onednn


def use_cpu_modules(model: DLRM, bf16: bool) -> None:
    """Replaces modules of a model that trains on CPU by faster ones.

    Args:
        bf16: Whether its matrix products run in bf16. PyTorch then takes oneDNN's itself.
    """
    if isinstance(model.interaction, DotInteraction):
        model.interaction = NumbaDots(model.interaction)
    onednn = not bf16 and torch.backends.mkldnn.is_available() and gains_from_onednn(torch.cpu.get_capabilities())
    for layers in (model.bottom, model.top):
        if layers is not None:
            use_cpu_layers(layers, onednn)


def use_cpu_layers(layers: nn.Sequential, onednn: bool) -> None:
    """Replaces the ReLUs of an MLP and, with oneDNN, its linear layers."""
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.ReLU):
            layers[place] = ReluInPlace()
        elif onednn and isinstance(layer, nn.Linear):
            layers[place] = OneDnnLinear(layer)


def gains_from_onednn(processor: Mapping[str, Any]) -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which PyTorch takes for them.

    As far as we know, MKL takes its AVX-512 code on Intel's processors only. Measured on an AMD EPYC (Zen 4).

    Args:
        processor: What `torch.cpu.get_capabilities` returns.
    Example:
        >>> gains_from_onednn({"cpu_name": "AMD EPYC 9554", "avx512_f": True})
        True
    """
    return bool(processor.get("avx512_f")) and "Intel" not in processor.get("cpu_name", "Intel")


def lacks_bf16(processor: Mapping[str, Any]) -> bool:
    """Whether bf16 matrices multiply slower than float32 ones on CPU: the processor or PyTorch has nothing for them.

    Measured without one: 124 to 147 GFLOP/s in float32 and 1 to 20 in bf16 on an AMD EPYC (Zen 3, AVX2), 208 and 58 on
    an Intel Xeon (Ice Lake, AVX-512).

    Args:
        processor: What `torch.cpu.get_capabilities` returns.
    """
    instructions = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")  # the last is ARM's
    return not (torch.backends.mkldnn.is_available() and any(processor.get(name) for name in instructions))


class ReluInPlace(nn.Module):
    """ReLU that writes into its argument and into the incoming gradient, with the same bits as `nn.ReLU`.

    The layers of an MLP allow that. A linear layer does not need its result in its backward pass, and nobody else
    reads a hidden layer's gradient. One that is a part of a larger tensor, which others may read, stays as it is.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out: torch.Tensor = _Relu.apply(values)
        return out


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(values.relu_())
        ctx.save_for_backward(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        [values] = ctx.saved_tensors
        whole = gradient.untyped_storage().nbytes() == gradient.nbytes
        into = gradient if whole else torch.empty_like(values)
        out: torch.Tensor = torch.ops.aten.threshold_backward.grad_input(gradient, values, 0, grad_input=into)
        return out


class OneDnnLinear(nn.Module):
    """A linear layer by oneDNN, float32 [B, inputs] -> [B, outputs], with the same bits with any number of threads.

    The ReLU behind it stays a layer of its own: oneDNN's would turn NaN into 0, and hide a training that diverges.

    Args:
        plain: What it replaces. It keeps the parameters.
    """

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out: torch.Tensor = _Linear.apply(inputs, self.weight, self.bias)
        return out


class _Linear(torch.autograd.Function):
    """The gradient of the weights stays with PyTorch: oneDNN is not faster there, because both factors are turned."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return multiply_onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        of_inputs = multiply_onednn(gradient, weight.t(), None) if ctx.needs_input_grad[0] else None
        return of_inputs, gradient.t() @ inputs, gradient.sum(0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model in training draws random numbers."""
    return any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
