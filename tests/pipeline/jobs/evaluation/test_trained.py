"""Registered models read their histories as declared when they were trained, several of them side by side."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.config import load
from pipeline.data.joined.reader import open_reader
from pipeline.data.joined.source import PinnedSource, pin_sources
from pipeline.errors import ConfigError
from pipeline.jobs.evaluation.trained import AS_DECLARED, read_as_trained, sources_as_trained
from pipeline.jobs.ingest.ingest import ingest_days
from pipeline.jobs.workspace import Workspace

DAY = pd.Timestamp("2024-01-01")
COLUMNS = ["user", "seen_item"]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """One user with ten events, an hour apart, and a row at noon. The config cuts the last two events."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    hours = pd.Series([DAY + pd.Timedelta(hours=hour) for hour in range(10)], dtype="datetime64[us]")
    pd.DataFrame({"user": 1, "time": hours, "item": range(10)}).to_parquet(tmp_path / "log.parquet")
    noon = pd.Series([DAY + pd.Timedelta(hours=12)], dtype="datetime64[us]")
    pd.DataFrame({"at": noon, "user": [1], "num": [0.5], "label": [1]}).to_parquet(tmp_path / "rows.parquet")
    values = {
        "name": "ads", "source": {"path": f"{tmp_path}/rows.parquet", "day_column": "at"},
        "features": {
            "dense": [{"columns": ["num"]}], "histories": [declared(tmp_path, last=2)],
            "sparse": [{"columns": COLUMNS, "transforms": [{"kind": "sigrid_hash", "size": 100}]}],
        },
        "split": {"days": {"train": ["2024-01-01"], "test": ["2024-01-02"]}},
    }  # fmt: skip
    made = Workspace(load(values))
    ingest_days(made, None, force=False)
    return made


def declared(folder: Path, **keys: Any) -> dict[str, Any]:
    own = {"path": f"{folder}/log.parquet", "on": "user", "time": "time", "as_of": "at", "columns": ["item"]}
    return own | {"prefix": "seen_"} | keys


def trained(workspace: Workspace, tmp_path: Path, **keys: Any) -> tuple[PinnedSource, ...]:
    """Sources of a training whose config declared the history in this way."""
    features = workspace.config.features.model_dump() | {"histories": [declared(tmp_path, **keys)]}
    sources = type(workspace.config.features).model_validate(features).sources
    return pin_sources(sources, tmp_path, workspace.warehouse)


def cut(workspace: Workspace, columns: list[str], joined: tuple[PinnedSource, ...]) -> dict[str, list[int]]:
    reader = open_reader(workspace.warehouse, workspace.warehouse.current("ads"), columns, None, joined)
    (fragment,) = reader.fragments()
    return {name: lists[0] for name, lists in reader.read(fragment).to_pydict().items()}


def test_two_versions_and_the_config_read_other_lists_of_one_name(workspace: Workspace, tmp_path: Path) -> None:
    rows = workspace.warehouse.current("ads")
    long = read_as_trained(workspace, 1, rows, trained(workspace, tmp_path, last=4), COLUMNS)
    late = read_as_trained(workspace, 2, rows, trained(workspace, tmp_path, delay_seconds=21_600), COLUMNS)
    assert (long.names, late.names) == ({"seen_item": "v1__seen_item"}, {"seen_item": "v2__seen_item"})
    joined = (*workspace.feature_joins(), *long.joined, *late.joined)
    found = cut(workspace, ["seen_item", "v1__seen_item", "v2__seen_item"], joined)
    assert found == {"seen_item": [9, 8], "v1__seen_item": [9, 8, 7, 6], "v2__seen_item": [5, 4, 3, 2, 1, 0]}
    scored = sources_as_trained(workspace, rows, trained(workspace, tmp_path, last=4))
    assert cut(workspace, ["seen_item"], scored) == {"seen_item": [9, 8, 7, 6]}


def test_what_is_declared_as_before_is_read_once(workspace: Workspace, tmp_path: Path) -> None:
    """Also from files that have moved. Sources of columns that the model does not read need not be there."""
    rows, same = workspace.warehouse.current("ads"), trained(workspace, tmp_path, last=2)
    moved = tuple(
        one.model_copy(update={"source": one.source.model_copy(update={"path": "gone/*.parquet"})}) for one in same
    )
    assert read_as_trained(workspace, 1, rows, moved, COLUMNS) == AS_DECLARED
    assert sources_as_trained(workspace, rows, moved) == workspace.feature_joins()
    other = tuple(
        one.model_copy(update={"source": one.source.model_copy(update={"path": "gone/*.parquet", "last": 9})})
        for one in same
    )
    assert read_as_trained(workspace, 1, rows, other, ["user"]) == AS_DECLARED
    with pytest.raises(ConfigError, match=r"gone/\*\.parquet"):
        read_as_trained(workspace, 1, rows, other, COLUMNS)
