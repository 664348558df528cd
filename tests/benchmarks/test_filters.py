"""The benchmark of filters reads the same rows both ways, and less of a sorted table."""

from pathlib import Path

import pytest

from benchmarks import filters
from benchmarks.filters import SHARES, as_text, measure
from benchmarks.machine import machine
from storage.config import WarehouseConfig


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", filters.ORDERS)
def test_a_sorted_table_is_read_in_part(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "WarehouseConfig", lambda: WarehouseConfig(row_group_rows=500))
    found = measure(order, 4_000, 1, tmp_path)
    assert [one["share"] for one in found] == list(SHARES)
    *some, few = [one["row_groups_skipped"] for one in found]
    assert some == ([0, 0] if order == "random" else [0, 7])
    assert few in (range(4, 8) if order == "random" else [7])  # four rows are in one to four of eight row groups
    assert all(one["seconds"] > 0 and one["ratio"] > 0 for one in found)
    text = as_text({"results": found, "machine": machine(filters.PACKAGES)})
    assert text.splitlines()[-1].startswith(f"| {order} | 0.1% |")
