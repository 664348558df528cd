"""Sums over windows: exact numbers against fractions, and work that grows with rows and events alone."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.joined import window_sums
from pipeline.data.joined.index import KeyIndex, TimedIndex
from pipeline.data.joined.window_sums import WindowSums
from pipeline.transforms.kernels import histories
from pipeline.transforms.kernels.histories import BLOCK, DIRECT

KINDS = ["counts", "prices", "wide", "cancelling", "gaps", "infinite", "tiny", "zeros", "one huge"]


def draw(kind: str, random: np.random.Generator, count: int) -> np.ndarray:
    values = random.normal(size=count)
    if kind == "counts":
        return np.rint(values * 100)
    if kind == "prices":
        return np.round(np.exp(values * 3), 2)
    if kind == "wide":
        return values * 10.0 ** random.integers(-300, 300, count)
    if kind == "cancelling":
        return np.where(np.arange(count) % 3, values, 1e17 * (-1.0) ** np.arange(count))
    if kind == "gaps":
        return np.where(random.random(count) < 0.4, np.nan, values)
    if kind == "infinite":
        return np.where(random.random(count) < 0.004, np.where(random.random(count) < 0.5, np.inf, -np.inf), values)
    if kind == "tiny":
        return values * 5e-324 * random.integers(0, 2**20, count)
    if kind == "zeros":
        return np.where(random.random(count) < 0.5, 0.0, -0.0)
    values[count // 4] = 1e300
    return values


def index_of(values: np.ndarray, starts: list[int]) -> TimedIndex:
    keys = KeyIndex.of_sorted(np.zeros(0, np.uint64), [], 1)
    return TimedIndex(keys, np.arange(len(values)), np.array(starts), [pa.array(values)])


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_exact_numbers(kind: str) -> None:
    random = np.random.default_rng(KINDS.index(kind))
    starts = [0, 700, 701, 2_000, 2_000, 2_600]
    values = draw(kind, random, starts[-1])
    numbers = random.integers(0, 5, 300)
    ends = np.array([random.integers(starts[k], starts[k + 1] + 1) for k in numbers])
    begins = np.array([random.integers(starts[k], end + 1) for k, end in zip(numbers, ends, strict=True)])
    sums, counts = WindowSums().find(0, index_of(values, starts), numbers, begins, ends)
    assert (ends - begins > DIRECT).sum() > 50
    for begin, end, found, count in zip(begins, ends, sums, counts, strict=True):
        window = values[begin:end]
        window = window[~np.isnan(window)]
        assert count == len(window)
        if end - begin <= DIRECT:
            assert found == sum(window.tolist()) or math.isnan(found)  # as they were
        elif np.isinf(window).any():
            signs = set(window[np.isinf(window)].tolist())
            assert (found in signs) if len(signs) == 1 else math.isnan(found)
        else:
            exact = sum(map(Fraction, window.tolist()), Fraction(0))
            assert abs(Fraction(found) - exact) <= Fraction(math.ulp(found)), (begin, end)
            if kind == "counts":
                assert Fraction(found) == exact


def test_a_sum_depends_on_its_window_alone() -> None:
    """Not on the place in the log, and not on what happened before: a server reads another part of the log."""
    random = np.random.default_rng(3)
    window = draw("prices", random, 500)
    found = set()
    for before in (0, 1, BLOCK - 1, BLOCK, 1_000):
        values = np.concatenate([draw("wide", random, before), window, draw("wide", random, 200)])
        place = np.array([0]), np.array([before]), np.array([before + 500])
        found.add(WindowSums().find(0, index_of(values, [0, len(values)]), *place)[0][0])
    assert len(found) == 1


def test_sums_of_keys_are_kept_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_sums, "KEPT_BYTES", 3_000)
    random = np.random.default_rng(4)
    starts = list(range(0, 6_001, 600))
    values, sums = draw("counts", random, 6_000), WindowSums()
    for _ in range(3):
        numbers = random.integers(0, 10, 50)
        begins, ends = numbers * 600 + random.integers(0, 300, 50), numbers * 600 + random.integers(300, 601, 50)
        found, _ = sums.find(0, index_of(values, starts), numbers, begins, ends)
        assert found.tolist() == [values[b:e].sum() for b, e in zip(begins, ends, strict=True)]
    kept = [key.blocks.nbytes for key in sums._kept.values()]
    assert 0 < sum(kept) == sums._bytes <= 3_000


class Counting:
    """Numbers that count how often one is read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.reads = values, 0

    def __getitem__(self, place: int) -> float:
        self.reads += 1
        return float(self.values[place])

    def to_numpy(self) -> "Counting":
        return self


def count_reads(rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often values are read for so many rows that each see all events before them, in batches of 100."""
    for name in ("_sum", "_measure", "_add", "_round", "_sum_blocks", "_sum_long"):
        loop: Any = getattr(histories, name)
        monkeypatch.setattr(histories, name, getattr(loop, "py_func", loop))
    values: Any = Counting(np.ones(rows))
    index = index_of(values.values, [0, rows])._replace(values=[values])
    sums = WindowSums()
    for first in range(0, rows, 100):
        ends = np.arange(first, first + 100)
        found, _ = sums.find(0, index, np.zeros(100, np.int64), np.zeros(100, np.int64), ends)
        assert found.tolist() == ends.tolist()
    return int(values.reads)


def test_work_on_one_key_grows_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = count_reads(500, monkeypatch), count_reads(4_000, monkeypatch)
    assert many <= 9 * few  # all pairs of a row and an event would be 64 times as many
    assert many <= 4_000 * (DIRECT + 2)
