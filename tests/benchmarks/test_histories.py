"""Both ways give the same features. Nothing is timed here."""

from pathlib import Path

from benchmarks.histories import read_all, tables


def test_cut_and_stored_lists_are_the_same_features(tmp_path: Path) -> None:
    specs = tables(tmp_path, rows=3_000, events=20_000, users=100, length=15)
    assert not specs["stored"].joined
    assert specs["cut"].joined
    digests = {way: read_all(spec)["digest"] for way, spec in specs.items()}
    assert digests["cut"] == digests["stored"]
