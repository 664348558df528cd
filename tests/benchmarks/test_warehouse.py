"""The commands run and print their measurements. Only counts are checked here, no times."""

import json
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from benchmarks import layout, model_size, warehouse
from benchmarks.machine import machine


@pytest.mark.nightly
def test_the_ladder_of_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))  # it sets the variable itself, which the fixture then takes back
    monkeypatch.setattr(layout, "JOBS", 3)
    shape = layout.SHAPES["RM3"]
    figures = layout.measure(shape, 0.02, 64, None, tmp_path)
    assert (figures["columns"], figures["read"], figures["runs"]) == (2 + 114 + 4, 1 + 10 + 1, 4)
    assert set(figures["record"]["popularity"]) == {"0.5", "0.8", "0.95"}
    figures |= {"shape": "RM3", "scale": 0.02, "machine": machine(layout.PACKAGES)}
    assert layout.as_text(figures).count("\n| ") == 7


def test_the_log_has_the_published_shape() -> None:
    shape, draw = layout.SHAPES["RM1"], np.random.default_rng(2)
    names = draw.permutation([*(f"d{i}" for i in range(300)), *(f"s{i}" for i in range(60))]).tolist()
    rows = layout.make_log(draw, shape, names, 2_000)
    there = [1 - rows[name].null_count / 2_000 for name in names]
    assert np.mean(there) == pytest.approx(shape.coverage, abs=0.05)
    lengths = [pc.mean(pc.list_value_length(rows[name])).as_py() for name in names if name.startswith("s")]
    assert np.mean(lengths) == pytest.approx(shape.length, rel=0.35)
    assert np.mean(there[:90]) > np.mean(there[-90:]) + 0.1  # popular features have more values


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


def test_a_table_made_from_metadata(capfd: pytest.CaptureFixture[str]) -> None:
    warehouse.main(["--files", "400", "--rounds", "1"])
    text = capfd.readouterr().out
    assert text.startswith("| 400 files | seconds |\n")
    assert text.count("\n| ") == 6


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8_192))
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    (tmp_path / "c").write_bytes(bytes(8_192))
    assert len(model_size.bytes_by_file(tmp_path)) == 2
