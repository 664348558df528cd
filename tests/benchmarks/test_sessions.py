"""All variants do the same work on the same rows. Nothing is timed here."""

from pathlib import Path

import pytest

from benchmarks.sessions import WAYS, epoch, measure_bytes, tables


@pytest.mark.nightly
def test_variants_differ_in_how_often_lists_are_stored(tmp_path: Path) -> None:
    specs = tables(tmp_path, rows=12_000, session_rows=10.0, list_ids=50)
    sizes = {name: measure_bytes(spec) for name, spec in specs.items()}
    assert sizes["plain"]["list_megabytes"] > 1.2 * sizes["ordered"]["list_megabytes"]
    assert sizes["ordered"] == sizes["deduplicated"]
    ids = [epoch(specs[name], 4_096)[0] for name in WAYS]
    assert ids[0] == ids[1] > 2 * ids[2]
