"""What `weights_sha256` means, in plain words."""

import hashlib
from collections.abc import Mapping

import torch


def hash_weights(weights: Mapping[str, torch.Tensor]) -> str:
    """Hashes the numbers of all weights in the order of their names."""
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
