"""A log with the labels needs a delay, however its files and its columns are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.ingest.ingest import ingest_days
from pipeline.jobs.leaks import refuse_leaks
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from tests.homes import draw_events

Open = Callable[..., Workspace]
HISTORY = {"on": "user", "time": "at", "as_of": "at", "columns": "item"}


@pytest.fixture
def open_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Samples with their label in a column `clicked`, and a log of other events."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    for folder in ("rows", "log"):
        (tmp_path / folder).mkdir()
    for day in (1, 2):
        clicked = [0, 1] * 30
        draw_events(day, 60, day, clicked=clicked, num=0.5).to_parquet(tmp_path / f"rows/clicks-{day}.parquet")
        draw_events(day, 60, 9 + day).to_parquet(tmp_path / f"log/{day}.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "rows")

    def make(source: dict[str, Any] | None = None, events: dict[str, Any] | None = None, **features: Any) -> Workspace:
        own = {"path": f"{tmp_path}/rows/*.parquet", "day_column": "at", "rename": {"clicked": "label"}}
        ids = {"columns": ["item"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}
        values = {
            "name": "ads", "source": {**own, **(source or {})}, "events": events or {},
            "features": {"dense": [{"columns": ["num"]}], "sparse": [ids], **features},
            "split": {"days": {"train": ["2024-01-01"], "test": ["2024-01-02"]}},
        }  # fmt: skip
        return Workspace(load(values))

    return make


@pytest.mark.parametrize("glob", ["rows/clicks*.parquet", "*/clicks-2.parquet", "link/*.parquet", "**/*.parquet"])
@pytest.mark.parametrize(
    "reads", [{"columns": "clicked"}, {"columns": "c*"}, {"columns": "item", "where": "clicked = 1"}]
)
def test_other_globs_of_the_samples_files_are_found(
    open_: Open, tmp_path: Path, glob: str, reads: dict[str, str]
) -> None:
    history = {**HISTORY, "path": f"{tmp_path}/{glob}", "prefix": "seen_", **reads}
    with pytest.raises(
        ConfigError, match=r"delay_seconds of features.histories .*: expected 1 or more, because it has"
    ):
        ingest_days(open_(histories=[history]), None, force=False)
    refuse_leaks(open_(histories=[{**history, "delay_seconds": 60}]))
    refuse_leaks(open_(histories=[{**history, "columns": "item", "where": None}]))


def test_an_event_table_of_the_samples_files_is_found_by_its_own_names(open_: Open, tmp_path: Path) -> None:
    events = {"seen": {"path": f"{tmp_path}/rows/click*", "key": "user", "time": "at", "rename": {"clicked": "liked"}}}
    history = {"table": "seen", "as_of": "at", "columns": "liked", "prefix": "seen_"}
    with pytest.raises(ConfigError, match=r"delay_seconds of features.histories 'seen': expected 1 or more"):
        ingest_days(open_(events=events, histories=[history]), None, force=False)
    refuse_leaks(open_(events=events, histories=[{**history, "columns": "item"}]))


def test_a_wider_glob_than_that_of_the_outcomes_is_found(open_: Open, tmp_path: Path) -> None:
    outcomes = {"path": f"{tmp_path}/rows/clicks-*.parquet", "on": "user", "feature_time": "at", "outcome_time": "at"}
    source = {"path": f"{tmp_path}/log/*.parquet", "rename": {}, "outcomes": {**outcomes, "on": "item"}}
    history = {**HISTORY, "path": f"{tmp_path}/rows/*", "prefix": "seen_"}
    with pytest.raises(ConfigError, match=r"delay_seconds of features.histories"):
        refuse_leaks(open_(source, histories=[history]))
    side = {"path": f"{tmp_path}/link/*.parquet", "on": ["user"]}
    with pytest.raises(ConfigError) as error:
        refuse_leaks(open_({**source, "lookups": [side]}))
    assert str(error.value) == (
        f"as_of of source.lookups '{side['path']}': expected the column with the time of the rows, and delay_seconds, "
        "because it has the labels, got none. Add them: without a time, each row reads its own label."
    )


def test_trainings_look_again(open_: Open, tmp_path: Path) -> None:
    """Files may come to match after the ingest."""
    history = {**HISTORY, "path": f"{tmp_path}/more/*.parquet", "columns": "c*", "prefix": "seen_"}
    (tmp_path / "more").mkdir()
    pd.read_parquet(tmp_path / "log/1.parquet").assign(cost=1.0).to_parquet(tmp_path / "more/1.parquet")
    workspace = open_(histories=[history])
    ingest_days(workspace, None, force=False)
    resolve_dataset(workspace, None)
    (tmp_path / "more/2.parquet").symlink_to(tmp_path / "rows/clicks-1.parquet")
    with pytest.raises(ConfigError, match=r"delay_seconds of features.histories"):
        resolve_dataset(workspace, None)
