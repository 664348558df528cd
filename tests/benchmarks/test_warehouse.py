"""The commands run and print their measurements. Only counts are checked here, no times."""

import json

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import layout, warehouse


def test_the_ladder_of_layouts(capfd: pytest.CaptureFixture[str]) -> None:
    layout.main(["--json", "--features", "60", "--rows", "512", "--rounds", "1", "--gap-bytes", "3000"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    steps = figures["steps"]
    assert list(steps) == ["map column", "flat columns", "coalesced reads", "popular first", "large row groups"]
    assert steps["map column"]["rows_per_second_x"] == 1
    assert steps["flat columns"]["bytes_read"] < steps["map column"]["bytes_read"]
    assert steps["flat columns"]["reads"] > steps["coalesced reads"]["reads"] > steps["popular first"]["reads"] == 8
    assert steps["coalesced reads"]["bytes_read"] > steps["popular first"]["bytes_read"]
    assert steps["large row groups"]["reads"] == 1
    assert layout.as_text(figures).count("\n| ") == 6 - 1


def test_the_map_table_has_the_features_of_the_flat_table() -> None:
    flat = layout.flat_table(np.random.default_rng(3), 10, 50)
    maps = layout.as_maps(flat)
    wanted = {"f1", "f4", "f7", "f8"}
    for column in ("numbers", "lists"):
        for name, (rows, values) in layout.features_of(maps[column], wanted).items():
            if len(rows):
                present = [(i, value) for i, value in enumerate(flat[name].to_pylist()) if value is not None]
                assert list(zip(rows.tolist(), values.to_pylist(), strict=True)) == present
    assert pa.types.is_map(maps.schema.field("lists").type)


def test_commits_plans_and_reads(capfd: pytest.CaptureFixture[str]) -> None:
    warehouse.main(["--json", "--columns", "12", "--days", "3", "2", "--rows", "10", "--rounds", "1"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures["columns"]["12"].keys() == {
        "commit_new_day", "commit_same_day", "plan_all_days", "plan_one_day", "read_a_day", "days_written"
    }  # fmt: skip
    assert list(figures["days"]) == ["2", "3"]
    assert min(figures["days"]["3"].values()) > 0
    assert "| days |" in warehouse.as_text(figures)


def test_many_columns_and_days(capfd: pytest.CaptureFixture[str]) -> None:
    warehouse.main(["--both", "12", "20", "--json", "--rows", "10", "--rounds", "1"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert len(figures["seconds"]) == 7
    assert all(one["seconds"] > 0 and 0 <= one["pyiceberg"] <= 1 for one in figures["seconds"].values())
    assert "| plan of one day |" in warehouse.as_size_table(figures)
