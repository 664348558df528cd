"""The benchmark delivers the same rows both ways. No time is checked here."""

import json
from pathlib import Path

import pytest

from benchmarks import transport as bench


@pytest.mark.nightly
def test_both_ways_deliver_all_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(tmp_path), "--rows", "4000", "--rounds", "1", "--workers", "1", "--json"]
    bench.main(words)
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    one = figures["workers"]["1"]
    assert min(one["memory_rows_per_second"], one["network_rows_per_second"], one["gigabytes"]) > 0
    assert one["memory"].keys() == one["network"].keys() == {"seconds", "cpu_seconds"}
