"""Tensors drawn from a seed."""

from typing import Any

import torch


def tensors(seed: int) -> dict[str, Any]:
    return {"model/weight": torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))}
