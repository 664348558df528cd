"""The benchmark leases what it says. No time is checked here."""

import json

import pytest

from benchmarks import control_plane as bench

SPLITS = 2_000


def test_an_epoch_leases_every_split_once() -> None:
    found = bench.run(bench.make_fragments(SPLITS), 8, SPLITS)
    assert (found["splits"], found["most_leases_of_a_split"]) == (SPLITS, 1)
    assert (found["rows"], found["ended"]) == (SPLITS * bench.SPLIT_ROWS, True)


@pytest.mark.nightly
def test_the_last_line_is_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--splits", "200", "--leased", "60", "--workers", "1", "4", "--rounds", "2"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert list(figures["workers"]) == ["1", "4"]
    for one in figures["workers"].values():
        assert 60 <= one["splits"] < 200
        assert one["most_leases_of_a_split"] == 1
    assert figures["memory"].keys() >= {"plan_bytes", "plan_bytes_per_split", "row_groups_bytes_per_split"}


def test_a_fleet_is_what_takes_the_rows() -> None:
    fleet = bench.imagine_fleet(10 * 24.16 * 11_623)
    assert (fleet["RM1"]["trainers"], fleet["RM1"]["workers"]) == (10, 242)
    assert fleet["RM1"]["master_share_of_trainer"] == pytest.approx(0.1)
