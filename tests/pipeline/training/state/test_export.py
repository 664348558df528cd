"""The exported file is the one that safetensors would write, made with one whole tensor in memory."""

import weakref
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline.training.state.export import export_weights
from tests.digest import hash_weights

WEIGHTS = {
    "logit.weight": torch.randn(1, 3, generator=torch.Generator().manual_seed(1)),
    "b": torch.tensor([0.5, -1.0], dtype=torch.float16),
    "embeddings.größe": torch.arange(12.0).reshape(3, 4).T,  # not contiguous
    "none": torch.empty(0, 4),
    "a": torch.tensor(7.0),
}


class Sharded:
    """A tensor on other ranks: whole only in the memory that `gather` is given. The last one must be gone by then."""

    last: Any = staticmethod(lambda: None)

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.dtype = whole, whole.dtype

    def local_shards(self) -> None: ...

    def size(self) -> torch.Size:
        return self.whole.size()

    def gather(self, dst: int, out: torch.Tensor | None) -> None:
        assert out is not None
        assert Sharded.last() is None
        Sharded.last = staticmethod(weakref.ref(out))
        out.copy_(self.whole)


def test_the_file_is_that_of_safetensors(tmp_path: Path, device: torch.device) -> None:
    done: list[int] = []
    tensors = {name: Sharded(value) if value.dim() == 2 else value for name, value in WEIGHTS.items()}
    digest = export_weights(tensors, tmp_path / "ours", lambda: done.append(1))
    expected = {name: value.float().contiguous() for name, value in WEIGHTS.items()}
    save_file(expected, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(value.equal(expected[name]) for name, value in load_file(tmp_path / "ours").items())
    assert digest == hash_weights(expected) == export_weights(tensors, None, lambda: None)
    assert len(done) == len(WEIGHTS)
