"""Keys that do not change what is learned are left out, wherever they stand."""

from typing import Annotated

from pydantic import BaseModel

from pipeline.marks import APART, LEARNED, PLACEMENT, keys_apart, learned_values
from pipeline.training.config import TrainConfig


class Part(BaseModel):
    name: str
    note: Annotated[str, APART] = "n"


class Section(BaseModel):
    rows: Annotated[int, LEARNED] = 3
    threads: int = 4


class Everything(BaseModel):
    home: Annotated[str, APART] = "h"
    seed: int = 1
    ranks: Annotated[int, PLACEMENT] = 2
    parts: tuple[Part, ...] = (Part(name="a"), Part(name="b"))
    own: Part = Part(name="c")
    batches: Annotated[Section, APART] = Section()
    report: Annotated[Part, APART] = Part(name="d")


def test_marked_keys_are_left_out():
    shared = {"seed": 1, "parts": [{"name": "a"}, {"name": "b"}], "own": {"name": "c"}, "batches": {"rows": 3}}
    assert learned_values(Everything(), lanes=False) == shared | {"ranks": 2}
    assert learned_values(Everything(), lanes=True) == shared


def test_the_keys_of_a_training_that_change_no_weight():
    assert keys_apart(TrainConfig) == {
        "launcher", "resources", "labels", "send_ids_ahead", "cuda_graph", "device", "threads_per_rank",
        "log_every_steps", "checkpoint_every_steps", "checkpoint_every_seconds", "checkpoint_async",
        "keep_checkpoints", "least_ranks", "restart_limit", "hang_seconds", "deadline_seconds",
    }  # fmt: skip
