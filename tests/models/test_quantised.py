"""Quantised tables, compared with the same arithmetic in NumPy, row by row."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models import quantised
from models.config import SparseFeature
from models.quantised import QuantisedBags, write_quantised
from models.tables import TABLES, tables_of

BAGS = (
    SparseFeature("a", "shared", 40, "sum"),
    SparseFeature("b", "own", 30, "mean"),
    SparseFeature("c", "shared", 40, "sum"),
)
"""A module may not be called `type`, so that table has another name."""
KEPT = SparseFeature("d", "type", 5, "mean")
WIDTH = 5
"""Not a multiple of the processors' vector width."""


def weights() -> dict[str, torch.Tensor]:
    """Rows of different magnitude, one of them constant, one with a single value that is not zero."""
    random = torch.Generator().manual_seed(3)
    found = {}
    for table in tables_of((*BAGS, KEPT)):
        rows = torch.randn(table.rows, WIDTH, generator=random)
        rows *= torch.logspace(-4, 2, table.rows).unsqueeze(1)
        rows[1], rows[2] = -3.25, torch.tensor([0.0, 0.0, 7.5, 0.0, 0.0])
        found[f"{TABLES}{table.name}.weight"] = rows
    return found | {"top.0.weight": torch.randn(4, 4, generator=random)}


def by_row(row: np.ndarray) -> np.ndarray:
    """Rounds a row to 256 steps from its minimum to its maximum, in float64."""
    low, step = row.min(), (row.max() - row.min()) / 255
    return row if step == 0 else low + np.rint((row - low) / step) * step


def rounded() -> dict[str, torch.Tensor]:
    """The weights as they are in the file."""
    with tempfile.TemporaryDirectory() as folder:
        write_quantised(weights(), Path(folder, "weights"))
        return load_file(Path(folder, "weights"))


def loaded() -> QuantisedBags:
    bags = QuantisedBags(tables_of((*BAGS, KEPT)), WIDTH)
    tables = {name: value for name, value in rounded().items() if name.startswith(TABLES)}
    bags.load_state_dict({name.removeprefix("embeddings."): value for name, value in tables.items()})
    return bags


@pytest.mark.parametrize("name", [name for name in weights() if name.startswith(TABLES)])
def test_a_number_is_off_by_at_most_half_a_step_of_its_row(name):
    rows = weights()[name].double().numpy()
    table = name.split(".")[2]
    bag = next(bag for bag in (*BAGS, KEPT) if bag.table in (table, table.rstrip("_")))
    every = torch.arange(bag.rows)
    found = loaded().embedding_bags[table](every, torch.arange(bag.rows + 1)).double().numpy()
    steps = (rows.max(1) - rows.min(1)) / 255
    float_error = np.abs(rows).max(1) * 1e-6 + 1e-8
    assert (np.abs(found - rows).max(1) <= steps * 0.501 + float_error).all()
    assert (np.abs(found - np.stack([by_row(row) for row in rows])).max(1) <= steps * 1.001 + float_error).all()
    assert np.allclose(found[1], -3.25)


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
def test_lists_are_summed_or_averaged_and_empty_ones_are_zeros(ids):
    lists = {"a": [[1, 2, 39], [], [2]], "b": [[], [29, 29, 0, 4], []], "c": [[39], [0, 1], []], "d": [[4], [], [0, 1]]}
    tables = loaded().embedding_bags
    for bag in (*BAGS, KEPT):
        table = "type_" if bag.table == "type" else bag.table
        rows = weights()[f"{TABLES}{table}.weight"].double().numpy()
        flat = torch.tensor([i for picked in lists[bag.name] for i in picked], dtype=ids)
        offsets = torch.tensor([0, *np.cumsum([len(picked) for picked in lists[bag.name]])])
        pooled = tables[table](flat, offsets).double().numpy()
        for vector, picked in zip(pooled, lists[bag.name], strict=True):
            expected = np.zeros(WIDTH)
            bound = 1e-5
            for i in picked:
                expected += by_row(rows[i]) / (len(picked) if bag.pooling == "mean" else 1)
                bound += np.abs(rows[i]).max() * 1e-6
            assert np.abs(vector - expected).max() <= bound, (bag, picked)


def test_no_ids_and_no_rows():
    table, none = loaded().embedding_bags["shared"], torch.empty(0, dtype=torch.int64)
    assert torch.equal(table(none, torch.zeros(4, dtype=torch.int64)), torch.zeros(3, WIDTH))
    assert table(none, torch.zeros(1, dtype=torch.int64)).shape == (0, WIDTH)


def test_only_the_tables_change():
    before, after = weights(), rounded()
    assert before.keys() == after.keys()
    assert torch.equal(after["top.0.weight"], before["top.0.weight"])
    assert {value.dtype for name, value in after.items() if name.startswith(TABLES)} == {torch.uint8}


def test_tables_are_rounded_a_part_at_a_time(monkeypatch):
    whole = rounded()
    monkeypatch.setattr(quantised, "PART_ROWS", 7)
    parts = rounded()
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
