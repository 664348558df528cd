"""A table of another engine is trained on as it is: no ingest, no copy, no write to it."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog

from flows.end_to_end import end_to_end
from flows.ingest import ingest
from flows.score import score
from flows.suggest import suggest
from pipeline.config import load
from pipeline.errors import ConfigError, DataError
from storage.config import WarehouseConfig
from storage.reader import DAY
from storage.warehouse import Warehouse
from tests.homes import CONFIG, open_smoke

SOURCE = {"name": "theirs", "source": {"table": "theirs.logs.samples", "day_column": "ds"}}


@pytest.fixture(scope="module")
def theirs(home: Path, smoke: Any, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """The rows of the smoke run in another catalog, partitioned by text and without a column `day`."""
    folder = tmp_path_factory.mktemp("theirs")
    catalog = load_catalog("theirs", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace("logs")
    own = Warehouse(WarehouseConfig(), home / "warehouse")
    snapshot = own.current("smoke")
    schema = own.schema(snapshot)
    names = [name for name in schema.names if name != DAY]
    table = catalog.create_table(
        "logs.samples", pa.schema([*(schema.field(name) for name in names), ("ds", pa.string())])
    )
    with table.update_spec() as update:
        update.add_identity("ds")
    reader = own.reader(snapshot, names)
    for fragment in reader.fragments():
        rows = reader.read(fragment)
        table.append(rows.append_column("ds", pa.array([f"{fragment.day}"] * rows.num_rows)))
    return catalog


@pytest.fixture
def at_home(theirs: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def keys(theirs: Catalog, tmp_path: Path) -> dict[str, Any]:
    """Our own tables are in the same database, in a namespace of each test."""
    return SOURCE | {"warehouse": {"catalog": dict(theirs.properties), "namespace": tmp_path.name}}


@pytest.mark.slow
def test_training_on_a_table_gives_the_model_of_an_ingest(
    at_home: Path, theirs: Catalog, keys: Any, smoke: Any
) -> None:
    table = theirs.load_table("logs.samples")
    done = end_to_end(CONFIG, keys)
    assert done["ingest"]["status"] == "ok"
    assert (done["ingest"]["days_written"], done["ingest"]["days_checked"], done["ingest"]["rows"]) == (0, 4, 20_000)
    assert done["train"]["weights_sha256"] == smoke["train"]["weights_sha256"]
    assert done["eval"]["ne"] == smoke["eval"]["ne"]
    assert table.refresh().metadata_location == theirs.load_table("logs.samples").metadata_location
    own = open_smoke(keys).warehouse
    assert [name[-1] for name in own.catalog.list_tables(own.config.namespace)] == ["theirs_profile"]


@pytest.mark.nightly
def test_days_are_checked_on_first_sight_and_after_each_change(
    at_home: Path, theirs: Catalog, keys: Any, plain: Any
) -> None:
    first = ingest(CONFIG, keys)
    assert (first["status"], first["days_checked"], first["days_skipped"]) == ("ok", 4, 0)
    assert (first["first_day"], first["last_day"]) == ("2025-01-06", "2025-01-09")
    assert (ingest(CONFIG, keys)["status"]) == "skipped"
    table = theirs.load_table("logs.samples")
    rows = table.scan(row_filter="ds = '2025-01-09'").to_arrow()
    table.append(rows.slice(0, 100))
    again = ingest(CONFIG, keys)
    assert (again["days_checked"], again["days_skipped"], again["days_changed"], again["rows"]) == (1, 3, 1, 5_100)
    table.delete("ds = '2025-01-09'")
    table.append(rows)
    assert ingest(CONFIG, keys | {"ingest.profile": False})["status"] == "skipped"
    assert ingest(CONFIG, keys)["days_changed"] == 1
    with pytest.raises(DataError, match=r"rule duplicates: expected .* set ingest.checks.duplicates to warn or off"):
        ingest(CONFIG, keys | {"ingest.checks": {"key": "cat_user", "duplicates": "quarantine"}}, force=True)


@pytest.mark.nightly
def test_scores_and_suggestions_come_from_the_table(at_home: Path, theirs: Catalog, keys: Any, plain: Any) -> None:
    end_to_end(CONFIG, keys)
    scored = score(CONFIG, keys, start=datetime.date(2025, 1, 9))
    assert (scored["status"], scored["rows"]) == ("ok", 5_000)
    own = open_smoke(keys).warehouse
    assert own.day_rows(own.current("theirs_scores")) == {datetime.date(2025, 1, 9): 5_000}
    path = suggest(CONFIG, keys)["config_path"]
    assert load(path).source.table == "theirs.logs.samples"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"table": "logs.samples", "path": "x.parquet"},
            "expected one of `path`, `table` and `generator`, got `path` and `table`",
        ),
        (
            {"table": "logs.samples", "positive": "yes"},
            "source.positive with source.table: expected rows that are read as",
        ),
        ({"path": "x.parquet", "day_column": "d", "branch": "b"}, "source.branch: expected `table` with it, got none"),
        ({"table": "samples"}, "expected a name such as namespace.table or catalog.namespace.table"),
        ({"table": "logs.samples", "day_zone": "Mars/Base"}, "expected a time zone such as UTC or Europe/Berlin"),
    ],
    ids=["two sources", "a change", "no table", "no namespace", "no zone"],
)
def test_what_does_not_fit_a_table_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(CONFIG, {"source": source})
    assert message in str(error.value)
