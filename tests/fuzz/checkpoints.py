"""Damaged checkpoints. Each file has a checksum, so damage is found, whatever it is."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

from pipeline.training.state import checkpoint
from pipeline.training.state.progress import TrainingProgress, load_progress
from storage.artifacts import sha256
from tests.fuzz.harness import Case, require
from tests.fuzz.mutate import mutate_bytes, mutate_json


def _tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "model/top.weight": torch.randn(4, 3, generator=random),
        "dense/top.weight/step": torch.tensor(3.0),
        "model/half": torch.randn(5, generator=random).bfloat16(),
        "model/count": torch.arange(4),
    }


def _written(folder: Path) -> Path:
    progress = TrainingProgress(steps=3, rows=96, best_ne=0.9, best_step=3, finished=True).model_dump(mode="json")
    checkpoint.write_whole(folder / "step-0000000003", _tensors(), progress, {"plan": "abc", "model": "def"})
    return folder / "step-0000000003"


@contextmanager
def sealed(folder: Path) -> Iterator[Case]:
    """Damage by a disk: what is read is what was written, or nothing is."""
    whole = _written(folder)
    contents = {path.name: path.read_bytes() for path in whole.iterdir()}

    def case(random: Random) -> None:
        name = random.choice(list(contents))
        damaged = mutate_bytes(random, contents[name])
        try:
            (whole / name).write_bytes(damaged)
            described = checkpoint.describe(whole)
            require(described["state"] in ("verified", "damaged"), "a state")
            if checkpoint.find_latest(folder) is None:
                require(described["state"] == "damaged", "no checkpoint, and no reason")
            found = checkpoint.export(whole)
            expected = {
                key.removeprefix("model/"): value for key, value in _tensors().items() if key.startswith("model/")
            }
            require(
                found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in found),
                "other weights",
            )
        finally:
            (whole / name).write_bytes(contents[name])

    yield case


@contextmanager
def forged(folder: Path) -> Iterator[Case]:
    """Other content with a manifest that fits it."""
    whole = _written(folder)
    contents = {path.name: path.read_bytes() for path in whole.iterdir() if path.name != checkpoint.MANIFEST}

    def case(random: Random) -> None:
        name = random.choice(list(contents))
        if name == checkpoint.PROGRESS and random.random() < 0.8:
            damaged = mutate_json(random, json.loads(contents[name]))
        else:
            damaged = mutate_bytes(random, contents[name])
        copy = folder / "copy" / whole.name
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(whole, copy)
        (copy / name).write_bytes(damaged)
        files = {path.name: sha256(path) for path in copy.iterdir() if path.name != checkpoint.MANIFEST}
        (copy / checkpoint.MANIFEST).write_text(json.dumps(files))
        described: dict[str, Any] = checkpoint.describe(copy)
        json.dumps(described)
        checkpoint.find_served(copy.parent)
        load_progress(copy)
        checkpoint.require_identity(copy, {"plan": "abc", "model": "def"})
        checkpoint.stored_shapes(copy)
        checkpoint.export(copy)

    yield case
