"""A training whose config does not fit its table is refused before anything is written."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load
from pipeline.data.profile import SCHEMA, profiles, store
from pipeline.errors import ConfigError, NotFiniteError, from_wire, to_wire
from pipeline.jobs.ingest.ingest import ingest
from pipeline.jobs.training.job import PLANS, resolve_dataset, resolve_job
from pipeline.jobs.training.train import describe_end, naming_outliers
from pipeline.jobs.workspace import Workspace
from pipeline.training.config import TrainConfig
from storage.errors import StorageError
from storage.snapshot.writing import replace_days
from tests.homes import open_smoke, write_config

SMALL = {"source.generator.rows_per_day": 100}
DAYS = tuple(datetime.date(2025, 1, day) for day in (6, 7, 8, 9))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four small days."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(folder))
        ingest(open_smoke(SMALL), DAYS)
        yield folder


def refusal(overrides: dict[str, Any], snapshot_id: int | None = None) -> str:
    with pytest.raises((ConfigError, StorageError)) as error:
        resolve_job(open_smoke(SMALL | overrides), snapshot_id, force=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"split.days.test": ["2030-01-01"]}, "split.days.test '2030-01-01': expected days of the table, 2025-01-06 to 2025-01-09, got no such day. Write the day to the table, or name another."),
        ({"filter": "num_price < -5"}, "split, part 'train': expected at least one row, got none. Change split or filter."),
        ({"filter": "event_time < '2025-01-09T00:00:00'"}, "split, part 'test': expected at least one row, got none. Change split or filter."),
        ({"filter": "nothing = 1"}, "filter 'nothing = 1': expected columns of the table, got 'nothing'. Closest: num_position, event_time, num_scroll_depth, list_interests, num_tenure_days, cat_item, num_price, num_item_age_hours. Correct the name."),
        ({"features.dense": [{"columns": ["num_prise"]}]}, "features.dense column 'num_prise' at snapshot SNAPSHOT of table 'smoke': expected a column of the table, got none of that name. Closest: num_price. Correct the name."),
        ({"evaluation.slices": ["contry"]}, "evaluation 'contry': expected a column of the table, got none of that name. Correct the name."),
        ({"gate.resample_by": "contry"}, "gate.resample_by 'contry': expected a column of the table, got none of that name. Correct the name."),
        ({"gate.resample_by": "list_interests"}, "gate.resample_by 'list_interests': expected one value a row, got large_list<element: int64>. Name another."),
        ({"registration.defaults": {"num_prise": 1}}, "registration.defaults 'num_prise': expected a column that the features read, got none of that name. Closest: num_price. Correct the name."),
        ({"registration.defaults": {"list_interests": 1}}, "registration.defaults 'list_interests': expected list<long>, got 1. Correct the value."),
        ({"preprocessing.session_column": "sesion"}, "preprocessing.session_column 'sesion': expected a column of the table, got none of that name. Correct the name."),
        ({"preprocessing.session_column": "num_price"}, "preprocessing.session_column 'num_price': expected integers or text, got double. Name another."),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_the_table_is_refused(home: Path, overrides: dict[str, Any], sentence: str) -> None:
    snapshot = open_smoke().warehouse.current("smoke").snapshot_id
    assert refusal(overrides) == sentence.replace("SNAPSHOT", f"{snapshot}")
    assert not (home / "runs").exists()
    assert not (home / PLANS).exists()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"session_column": "list_interests"}, "preprocessing.session_column 'list_interests': expected integers or text, got "),
        ({"session_column": "session_id", "deduplicate": ["lst_*"]}, "preprocessing.deduplicate 'lst_*': expected a sparse feature, got none of that name. Closest: "),
    ],
)  # fmt: skip
def test_sessions_are_of_columns_that_hold_some(home: Path, keys: dict[str, Any], sentence: str) -> None:
    assert refusal({f"preprocessing.{key}": value for key, value in keys.items()}).startswith(sentence)


@pytest.mark.parametrize("key", ["name", "table"])
@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\n", "a.b"])
def test_names_of_features_that_become_paths_are_refused(home: Path, key: str, name: str) -> None:
    said = refusal({f"features.sparse.0.{key}": name})
    assert "letters" in said or "name" in said
    assert not (home / "runs").exists()


def test_a_snapshot_that_is_gone_is_named(home: Path) -> None:
    assert refusal({}, 7) == (
        "snapshot 7 of table 'smoke': expected a snapshot of the table, got none of that id. It may have expired. "
        "Use the current snapshot."
    )


def test_an_emptied_day_is_no_day_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    ingest(open_smoke(SMALL), DAYS)
    warehouse = open_smoke().warehouse
    replace_days(warehouse, "smoke", {DAYS[3]: "gone"}, warehouse.schema(warehouse.current("smoke")), [], 0)
    assert refusal({}) == (
        "split.days.test '2025-01-09': expected days of the table, 2025-01-06 to 2025-01-08, got no such day. "
        "Write the day to the table, or name another."
    )
    assert not (tmp_path / "runs").exists()


def test_rows_without_a_key_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    rows = pa.table({
        "clicked": [0, 1] * 20, "x": [0.5] * 40, "user": pa.array([None] * 30 + list(range(10)), pa.int64()),
        "shop": list(range(40)),
    })  # fmt: skip
    pq.write_table(rows, tmp_path / "rows.parquet")
    base = {
        "name": "rows", "source": {"path": f"{tmp_path}/rows.parquet", "day": "2025-01-06"},
        "features": {"label": "clicked", "dense": [{"columns": ["x"]}], "sparse": [{"columns": ["shop"], "transforms": [{"kind": "sigrid_hash", "size": 64}]}]},
        "split": {"hash": {"key": "shop", "shares": {"train": 0.5, "test": 0.5}}},
    }  # fmt: skip
    path = write_config(tmp_path, base)
    ingest(Workspace(load(path)), ())

    def said(overrides: dict[str, Any]) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO"):
            resolve_dataset(Workspace(load(path, overrides)), None)
        lines = [one.getMessage() for one in caplog.records]
        return [one.partition(": as keys of ")[2] for one in lines if one.startswith("30 of 40 rows have no user:")]

    assert said({"split.hash.key": "user"}) == ["split.hash.key, each is on its own"]
    assert said({"sampling": {"inputs": ["user"], "rate": 0.9}}) == ["sampling.inputs, each is on its own"]
    assert said({"gate.resample_by": "user"}) == ["gate.resample_by, each is on its own"]
    assert said({"split.hash.key": ["user", "shop"]}) == said({}) == []


@pytest.mark.parametrize(
    ("keys", "best", "said"),
    [
        ({"patience": 6}, 900, True),
        ({"patience": 6, "max_steps": 900}, 900, True),
        ({"patience": 6}, 880, False),
        ({}, 900, False),
    ],
)
def test_a_training_that_ended_while_it_got_better_says_so(keys: dict[str, int], best: int, said: bool) -> None:
    note = describe_end(TrainConfig(**keys), {"steps": 900, "best_step": best, "valid_ne": 0.81234})
    assert (note is not None) == said
    if note is not None:
        assert note.startswith("valid NE was still improving at the last step, 900: 0.8123. Raise training.epochs")
    assert describe_end(TrainConfig(**keys), {"steps": 900, "best_step": 900, "valid_ne": None}) is None


def test_a_loss_that_is_not_finite_names_the_farthest_outlier(home: Path) -> None:
    """As the statistics of the ingest know it, if the model reads it as it is."""
    workspace = open_smoke(SMALL)
    data = resolve_dataset(workspace, None)[1]["train"]
    dense = sorted(column for feature in data.plan.dense for column in data.plan.columns_of(feature))
    error = from_wire(to_wire(NotFiniteError("loss at step 5", "a finite number", "nan", "Lower the rates.")))

    def said() -> str:
        with pytest.raises(NotFiniteError) as caught, naming_outliers(workspace, data):
            raise error
        return str(caught.value)

    assert said() == f"{error}", "ordinary values are not blamed"
    day = data.selection.days[0]
    known = profiles(workspace.warehouse, workspace.config.name, [day]).to_pylist()
    for row in known:
        row["rows"] = 10_000
        if row["column"] in (dense[0], "label"):
            row |= {"mean": 1e26, "deviation": 1e28, "minimum": 0.0, "maximum": 1e30}
    store(workspace.warehouse, workspace.config.name, pa.Table.from_pylist(known, SCHEMA), {day: "outlier"})
    assert said() == (
        f"loss at step 5: expected a finite number, got nan; column '{dense[0]}' holds 1e+30 on {day}. "
        f"Clamp '{dense[0]}' (kind: clamp), or mend the rows of {day}; the last good checkpoint is kept."
    )
