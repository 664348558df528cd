"""The exported file is the one that safetensors would write, made with one whole tensor in memory."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.training.state import export
from pipeline.training.state.checkpoint import gather_whole
from tests.digest import hash_weights

WEIGHTS = {
    "logit.weight": torch.randn(1, 3, generator=torch.Generator().manual_seed(1)),
    "b": torch.tensor([0.5, -1.0], dtype=torch.float16),
    "embeddings.größe": torch.arange(12.0).reshape(3, 4).T,  # not contiguous
    "embeddings.other": torch.arange(8.0).reshape(2, 4),
    "none": torch.empty(0, 4),
    "a": torch.tensor(7.0),
}


class Sharded:
    """A tensor in two shards of columns, both on this rank."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.dtype = whole, whole.dtype
        half = whole.shape[1] // 2
        self.parts = [
            SimpleNamespace(
                shard_offsets=[0, first], shard_sizes=[len(whole), stop - first], placement=SimpleNamespace(rank=lambda: 0)
            )
            for first, stop in ((half, whole.shape[1]), (0, half))
        ]  # fmt: skip

    def size(self) -> torch.Size:
        return self.whole.size()

    def metadata(self) -> Any:
        return SimpleNamespace(shards_metadata=self.parts)

    def local_shards(self) -> list[Any]:
        return [
            SimpleNamespace(metadata=part, tensor=self.whole.narrow(1, part.shard_offsets[1], part.shard_sizes[1]))
            for part in self.parts
        ]


def one_at_a_time(tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields what `gather_whole` does. The one before must be gone by then."""
    before: Any = lambda: None  # noqa: E731
    for name, whole in gather_whole(tensors):
        assert before() is None
        before = weakref.ref(whole)
        yield name, whole
        del whole


def test_the_file_is_that_of_safetensors(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "gather_whole", one_at_a_time)
    done: list[int] = []
    tensors = {name: Sharded(value) if "embeddings" in name else value for name, value in WEIGHTS.items()}
    digest = export.export_weights(tensors, tmp_path / "ours", lambda: done.append(1))
    expected = {name: value.float().contiguous() for name, value in WEIGHTS.items()}
    save_file(expected, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(value.equal(expected[name]) for name, value in load_file(tmp_path / "ours").items())
    assert digest == hash_weights(expected) == export.export_weights(tensors, None, lambda: None)
    assert len(done) == len(WEIGHTS)
