"""An ingest tells how often features of an earlier day change, against lists and counts from loops over the logs."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.config import load
from pipeline.config.retention import RetentionConfig
from pipeline.jobs.ingest import recompute
from pipeline.jobs.ingest.ingest import ingest_days, ingest_event_tables
from pipeline.jobs.upkeep.clean import remove_snapshots
from pipeline.jobs.workspace import Workspace
from tests.homes import draw_events

FIRST = pd.Timestamp("2024-01-01")
LAST, SPAN = 4, 7_200
Open = Callable[..., Workspace]
draw = partial(draw_events, users=6)


def add_day(folder: Path, day: int) -> None:
    draw(day, 60, day).to_parquet(folder / f"log/{day}.parquet")
    draw(day, 300, 10 + day, label=np.arange(300) % 2, num=0.5).to_parquet(folder / f"rows/{day}.parquet")


@pytest.fixture
def open_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Two days of samples and of a log that histories and windows read as a table or as files."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    for folder in ("rows", "log"):
        (tmp_path / folder).mkdir()
    for day in (1, 2):
        add_day(tmp_path, day)

    def make(files: bool = False, stored: bool = False, **checks: Any) -> Workspace:
        log = {"path": f"{tmp_path}/log/*.parquet", "on": "user", "time": "at"} if files else {"table": "watched"}
        seen = log | {"as_of": "at", "last": LAST, "columns": ["item"], "prefix": "seen_", "stored": stored}
        count = log | {"as_of": "at", "seconds": [SPAN], "take": ["count"], "prefix": "n_", "stored": stored}
        ids = {"columns": ["seen_item"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}
        values: dict[str, Any] = {
            "name": "ads",
            "source": {"path": f"{tmp_path}/rows/*.parquet", "day_column": "at"},
            "features": {
                "dense": [{"columns": ["num", "n_*"]}], "sparse": [ids], "histories": [seen], "windows": [count],
            },
            "split": {"days": {"train": ["2024-01-01"], "test": ["2024-01-02"]}},
            "ingest": {"checks": checks},
        }  # fmt: skip
        if not files:
            values["events"] = {"watched": {"path": f"{tmp_path}/log/*.parquet", "key": "user", "time": "at"}}
        return Workspace(load(values))

    return make


def compute(folder: Path, day: int) -> list[tuple[list[int], int]]:
    """The list and the count of each row of a day, with the log as its files are now."""
    log = pd.concat([pd.read_parquet(path) for path in sorted((folder / "log").iterdir())])
    log = log.sort_values("at", kind="stable")
    found = []
    for row in pd.read_parquet(folder / f"rows/{day}.parquet").itertuples():
        mine = log[(log["user"] == row.user) & (log["at"] < row.at)]
        recent = mine[mine["at"] >= row.at - pd.Timedelta(seconds=SPAN)]
        found.append((mine["item"].tolist()[::-1][:LAST], len(recent)))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", [{}, {"stored": True}, {"files": True}, {"files": True, "stored": True}], ids=lambda how: "-".join(how)
)
def test_an_ingest_measures_how_often_features_of_the_day_before_change(
    open_: Open, tmp_path: Path, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Late events come with the next day: of that day's log, and of an evening before."""
    first = ingest_days(open_(**how), None, force=False)
    assert first["recomputed"] is None
    before = compute(tmp_path, 2)
    add_day(tmp_path, 3)
    draw(2, 9, 99).to_parquet(tmp_path / "log/2-late.parquet")
    with caplog.at_level(logging.WARNING):
        found = ingest_days(open_(**how), None, force=False)["recomputed"]
    pairs = list(zip(before, compute(tmp_path, 2), strict=True))
    expected = {"seen_item": sum(one[0] != two[0] for one, two in pairs)}
    expected["n_count_7200"] = sum(one[1] != two[1] for one, two in pairs)
    assert min(expected.values()) > 3
    assert (found["day"], found["rows"], found["lost"]) == ("2024-01-02", 300, [])
    assert {one["feature"]: one["differing"] for one in found["features"]} == expected
    lines = [line for line in caplog.messages if "changed after the day was written" in line]
    assert len(lines) == 2
    assert Path(found["report"]).exists()
    again = ingest_days(open_(**how), None, force=False)
    assert (again["status"], again["recomputed"]) == ("skipped", None)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_a_day_that_is_written_again_is_compared_with_its_first_state(
    open_: Open, tmp_path: Path, stored: bool
) -> None:
    """The newest day gets more rows with the late events, as when late outcomes arrive."""
    ingest_days(open_(stored=stored), None, force=False)
    rows = [pd.read_parquet(tmp_path / "rows/2.parquet"), draw(2, 40, 55, label=np.arange(40) % 2, num=0.5)]
    pd.concat(rows).to_parquet(tmp_path / "rows/2.parquet")
    before = compute(tmp_path, 2)
    draw(2, 9, 99).to_parquet(tmp_path / "log/2-late.parquet")
    done = ingest_days(open_(stored=stored), None, force=False)
    pairs = list(zip(before, compute(tmp_path, 2), strict=True))
    assert (done["days_written"], done["recomputed"]["day"], done["recomputed"]["rows"]) == (1, "2024-01-02", 340)
    assert {one["feature"]: one["differing"] for one in done["recomputed"]["features"]} == {
        "seen_item": sum(one[0] != two[0] for one, two in pairs),
        "n_count_7200": sum(one[1] != two[1] for one, two in pairs),
    }


@pytest.mark.nightly
def test_days_of_the_log_that_no_row_saw_change_nothing(open_: Open, tmp_path: Path) -> None:
    """The usual night: a new day of both, and no late event."""
    ingest_days(open_(), None, force=False)
    add_day(tmp_path, 3)
    found = ingest_days(open_(), None, force=False)["recomputed"]
    assert [one["differing"] for one in found["features"]] == [0, 0]
    add_day(tmp_path, 4)
    assert ingest_days(open_(changed_share=None), None, force=False)["recomputed"] is None


@pytest.mark.nightly
def test_a_part_of_a_large_day_is_compared(open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sixth row. Users get an event before all others, so that each row of them changes."""
    monkeypatch.setattr(recompute, "MOST_ROWS", 50)
    ingest_days(open_(changed_share=1.0), None, force=False)
    add_day(tmp_path, 3)
    recent = pd.read_parquet(tmp_path / "rows/2.parquet")[["user", "at", "item"]]
    recent["at"] -= pd.Timedelta(seconds=1)
    recent.to_parquet(tmp_path / "log/2-late.parquet")
    found = ingest_days(open_(changed_share=1.0), None, force=False)["recomputed"]
    assert [(one["rows"], one["differing"]) for one in found["features"]] == [(50, 50), (50, 50)]


@pytest.mark.nightly
@pytest.mark.parametrize("files", [False, True])
def test_a_state_that_is_lost_is_named(open_: Open, tmp_path: Path, files: bool) -> None:
    """An expired snapshot of a table, or a file that was written again. The ingest goes on."""
    ingest_days(open_(files=files), None, force=False)
    draw(2, 70, 5).to_parquet(tmp_path / "log/2.parquet")
    add_day(tmp_path, 3)
    if not files:
        ingest_event_tables(open_(), force=True)
        retention = RetentionConfig(snapshots_days=1e-9, leftovers_days=1e-9)
        remove_snapshots(Workspace(open_().config.model_copy(update={"retention": retention})), [], False)
    found = ingest_days(open_(files=files), None, force=False)
    assert (found["days_written"], found["recomputed"]["features"]) == (1, [])
    assert [name.split(" ")[0] for name in found["recomputed"]["lost"]] == ["features.histories", "features.windows"]


@pytest.mark.nightly
def test_a_measurement_that_fails_does_not_end_the_ingest(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ingest_days(open_(), None, force=False)
    add_day(tmp_path, 3)
    monkeypatch.setattr(recompute, "compare_pinned", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert ingest_days(open_(), None, force=False)["status"] == "ok"
    assert "computing features of an earlier day again failed: ZeroDivisionError" in caplog.text
