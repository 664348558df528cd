"""All passes make the same batches, and the cache keeps its bound. Nothing is timed here."""

from pathlib import Path

import pytest

from benchmarks.cache import run_pass
from benchmarks.wide_table import wide_table


@pytest.mark.nightly
def test_passes_differ_in_what_they_read(tmp_path: Path) -> None:
    table = wide_table(tmp_path, 140_000)  # three row groups
    passes = {name: run_pass(table, name, 2) for name in ("off", "cold", "warm", "half", "small", "service", "sweep")}
    same = ("off", "cold", "warm", "half", "small")
    assert len({passes[name]["order_hash"] for name in same}) == 1
    assert passes["cold"]["megabytes_read"] == passes["off"]["megabytes_read"] > passes["half"]["megabytes_read"] > 0.0
    assert (passes["warm"]["megabytes_read"], passes["warm"]["misses"]) == (0.0, 0)
    assert passes["small"]["cache_megabytes"] <= passes["warm"]["cache_megabytes"] / 2
    made = passes["cold"]["misses"]  # of 40 columns; the second trial makes its own, and the one that the first lacked
    assert (passes["service"]["misses"], passes["service"]["hits"]) == (made, 2 * made)
    assert passes["sweep"]["misses"] == made + 2 * made // 40
