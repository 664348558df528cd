"""The command lays out files for the columns that are read. Rows, days and models stay the same."""

import json
from pathlib import Path

import pytest

from flows.features import features
from flows.ingest import ingest
from flows.layout import layout
from flows.preprocess import preprocess
from storage.config import WarehouseConfig
from storage.layout.rewrite import layout_of
from storage.warehouse import Warehouse
from tests.homes import CONFIG, read_rows

INLINE, FEW = "preprocessing.executor=inline", "source.generator.rows_per_day=1500"


def rows(home: Path) -> list[str]:
    warehouse = Warehouse(WarehouseConfig(), home / "warehouse")
    return [str(row) for row in read_rows(warehouse, "smoke").to_pylist()]


@pytest.mark.nightly
def test_a_table_is_laid_out_for_its_readers(command, tmp_path):
    assert command(ingest, CONFIG, FEW, home=tmp_path)[0] == 0
    before = rows(tmp_path)
    code, epoch, _ = command(preprocess, CONFIG, INLINE, home=tmp_path)
    assert (code, epoch["reads"] > 0) == (0, True)
    [record] = (tmp_path / "reads" / "smoke").glob("*.json")
    kept = json.loads(record.read_text())
    assert {key: kept[key] for key in ("by", "rows", "bytes_read", "reads")} == {
        "by": "preprocess", "rows": epoch["rows"], "bytes_read": epoch["bytes_read"], "reads": epoch["reads"]
    }  # fmt: skip

    assert sum(kept["read_sizes"].values()) == epoch["reads"]
    assert set(kept["popularity"]) == {"0.5", "0.8", "0.95"}
    assert 0 < kept["popularity"]["0.8"] < kept["bytes_read"] / kept["bytes_stored"] + 0.05  # one run: its own columns

    files = sorted(path.name for path in (tmp_path / "warehouse").rglob("*.parquet"))
    code, ladder, said = command(layout, CONFIG, INLINE, "action=ladder", home=tmp_path)
    assert (code, len(ladder["steps"]), ladder["runs"]) == (0, 7, 1)
    assert ladder["read"] == len(kept["columns"]) < ladder["columns"]
    assert [step["published"] for step in ladder["steps"]][-1] == [2.94, 2.41]
    assert ladder["steps"][0]["bytes_read"] > ladder["steps"][1]["bytes_read"] == ladder["steps"][3]["bytes_read"]
    assert "7. large row groups: 1 reads of about" in said
    assert sorted(path.name for path in (tmp_path / "warehouse").rglob("*.parquet")) == files

    code, proposal, said = command(layout, CONFIG, INLINE, home=tmp_path)
    assert (code, proposal["action"], proposal["runs"]) == (0, "propose", 1)
    assert set(proposal["layout"]["first"]) == set(kept["columns"]) == set(proposal["wanted"])
    assert proposal["after"]["reads"] <= proposal["before"]["reads"]
    assert proposal["before"]["bytes_stored"] > proposal["before"]["bytes_read"] > 0
    assert "columns were read by one of 1 runs or the config" in said
    assert rows(tmp_path) == before

    words = ("action=deprecate", "name=cat_device", "instead=cat_country")
    assert command(features, CONFIG, *words, home=tmp_path)[0] == 0  # deprecated columns are still in the files
    measured = command(layout, CONFIG, "action=measure", home=tmp_path)[1]
    assert (measured["rows"], measured["columns"]) == (len(before), len(kept["columns"]))
    code, applied, _ = command(layout, CONFIG, "action=apply", home=tmp_path)
    assert (code, applied["status"], applied["rows"]) == (0, "ok", len(before))
    assert rows(tmp_path) == before
    assert command(layout, CONFIG, "action=measure", home=tmp_path)[1]["reads"] < measured["reads"]
    assert command(layout, CONFIG, "action=apply", home=tmp_path)[1]["status"] == "skipped"
    assert command(ingest, CONFIG, FEW, home=tmp_path)[1]["status"] == "skipped"  # the identities of days are unchanged
    again = command(preprocess, CONFIG, INLINE, "features.allow_deprecated=true", home=tmp_path)[1]
    assert again["rows"] == epoch["rows"]


@pytest.mark.slow
def test_the_command_removes_old_snapshots_and_their_files(command, tmp_path):
    assert command(ingest, CONFIG, FEW, home=tmp_path)[0] == 0
    assert command(ingest, CONFIG, FEW, "force=true", "warehouse.file_rows=100", home=tmp_path)[0] == 0
    before = rows(tmp_path)
    words = ("action=expire", "older_than_days=0")
    counted = command(layout, CONFIG, *words, home=tmp_path)[1]
    assert (counted["dry_run"], counted["snapshots"] > 0) == (True, True)
    done = command(layout, CONFIG, *words, "dry_run=false", home=tmp_path)[1]
    assert (done["snapshots"], done["kept"]) == (counted["snapshots"], 1)
    words = ("action=vacuum", "older_than_hours=0")
    assert command(layout, CONFIG, "action=vacuum", home=tmp_path)[1]["files"] == 0  # all of them are too young
    counted = command(layout, CONFIG, *words, home=tmp_path)[1]
    done = command(layout, CONFIG, *words, "dry_run=false", home=tmp_path)[1]
    assert (done["files"], done["bytes"]) == (counted["files"], counted["bytes"])
    assert done["files"] > 0
    assert command(layout, CONFIG, "action=compact", home=tmp_path)[1]["status"] in ("ok", "skipped")
    assert sorted(rows(tmp_path)) == sorted(before)
    assert command(ingest, CONFIG, FEW, home=tmp_path)[1]["status"] == "skipped"


@pytest.mark.nightly
def test_invalid_actions_are_refused(command, tmp_path):
    assert command(ingest, CONFIG, FEW, home=tmp_path)[0] == 0
    code, result, _ = command(layout, CONFIG, "order_by=[no_such]", home=tmp_path)
    assert code == 1
    assert result["error"].startswith("column 'no_such': expected a column of table 'smoke'")
    code, result, _ = command(layout, CONFIG, "action=destroy", home=tmp_path)
    assert (code, "action" in result["error"]) == (1, True)
    code, result, _ = command(layout, CONFIG, "action=ladder", "table=smoke_profile", home=tmp_path)
    assert (code, result["error"]) == (1, "table: expected the table of the config, 'smoke', got 'smoke_profile'. "
        "Leave out table=, or give the config of that table.")  # fmt: skip
    words = ("action=ladder", "features.joined=[{table: users, on: [cat_user]}]")
    code, result, _ = command(layout, CONFIG, *words, home=tmp_path)
    assert (code, "features.joined: expected columns of the table" in result["error"]) == (1, True)
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "warehouse")
    assert layout_of(warehouse, "smoke").first == ()
