"""A served model computes histories and windows from event logs that its caller names."""

import json
import subprocess
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.config import DLRMConfig
from pipeline.errors import ConfigError, InputError
from pipeline.inference.files import MODEL
from pipeline.inference.model import LoadedModel
from pipeline.registration.register import pack, raw_frame, requirements_of
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.bare import run_with
from tests.pipeline.data.joined.logs import by_day, cut, events, sample_rows
from tests.pipeline.data.joined.tables import stored

SEEN = {
    "table": "watched", "on": "user", "time": "time", "as_of": "at", "columns": "item", "prefix": "seen_",
    "delay_seconds": 600, "last": 5,
}  # fmt: skip
WINDOW = {
    "path": "visits/*.parquet", "on": ["user", "shop"], "time": "time", "as_of": "at", "seconds": [7_200],
    "prefix": "visits_", "where": "action = 'finish'",
}  # fmt: skip
SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["visits_count_7200"], "transforms": [{"kind": "log"}]}],
        "sparse": [
            {"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 50}]},
            {"columns": ["seen_item"], "pooling": "mean", "transforms": [{"kind": "sigrid_hash", "size": 100}]},
        ],
        "histories": [SEEN],
        "windows": [WINDOW],
    }
)


@pytest.fixture
def log() -> pa.Table:
    return events(np.random.default_rng(5))


@pytest.fixture
def rows() -> pa.Table:
    return sample_rows(np.random.default_rng(6))


@pytest.fixture
def folder(log: pa.Table, rows: pa.Table, exported, tmp_path: Path) -> Path:
    """A packed model, and its log in two files."""
    pq.write_table(log[:400], tmp_path / "a.parquet")
    pq.write_table(log[400:], tmp_path / "b.parquet")
    made = [("seen_item", pa.large_list(pa.int32())), ("visits_count_7200", pa.int64())]
    schema, config = pa.schema([*rows.schema, *made]), DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))
    weights, plan = exported(SCHEMA, schema, config, spread=0.3)
    return pack(tmp_path / "model", weights, plan, config, schema, logs=SCHEMA.logs)


def count_finished(rows: pa.Table, log: pa.Table) -> list[int]:
    """Events of a row's user and shop that were finished in the two hours before it."""
    visits, found = log.to_pandas(), []
    for row in rows.to_pylist():
        if row["user"] is None or row["at"] is None:
            found.append(0)
            continue
        mine = visits[(visits.user == row["user"]) & (visits.shop == row["shop"]) & (visits.action == "finish")]
        at = pd.Timestamp(row["at"])
        found.append(int(((mine.time >= at - pd.Timedelta(hours=2)) & (mine.time < at)).sum()))
    return found


@pytest.mark.slow
def test_lists_and_windows_are_those_of_a_loop_over_the_rows(folder, log, rows, tmp_path):
    """Rows without a user or a time have no events. With the same values in the rows, the scores are the same bits."""
    given = str(tmp_path / "?.parquet")
    reading = LoadedModel(folder, logs={"watched": given, "visits/*.parquet": [given]})
    frame = raw_frame(rows, reading.inputs)
    assert set(frame) == {"user", "shop", "at"}
    found = reading.complete(reading.table_of(frame))
    lists, counts = cut(rows, log, ["user"], 600, 5), count_finished(rows, log)
    assert found.column("seen_item").to_pylist() == lists
    assert found.column("visits_count_7200").to_pylist() == counts
    assert sum(map(len, lists)) > 1_000
    assert max(counts) > 1
    ready = frame.assign(seen_item=lists, visits_count_7200=counts)
    expected = LoadedModel(folder).probabilities(ready)
    np.testing.assert_array_equal(reading.probabilities(frame), expected)

    one = LoadedModel(folder, logs={"watched": given})  # the other log's counts are in the rows
    np.testing.assert_array_equal(one.probabilities(ready.drop(columns="seen_item")), expected)
    with pytest.raises(InputError, match="none named visits_count_7200"):
        one.probabilities(frame)
    assert len(reading.probabilities(frame[:0])) == 0


def test_logs_are_read_with_the_requirements_alone(folder, rows, tmp_path):
    requirements = requirements_of(json.loads((folder / MODEL).read_text()))
    pq.write_table(rows, tmp_path / "rows.parquet")
    code = f"""
from pathlib import Path
import pyarrow.parquet as pq
import pipeline.registration.scorer
from pipeline.inference.model import LoadedModel
files = ["{tmp_path}/a.parquet", "{tmp_path}/b.parquet"]
loaded = LoadedModel(Path("{folder}"), logs={{"watched": files, "visits/*.parquet": files}})
assert len(loaded.probabilities(pq.read_table("{tmp_path}/rows.parquet"))) == {len(rows)}
"""
    run_with(requirements, code)
    with pytest.raises(subprocess.CalledProcessError):
        run_with([one for one in requirements if not one.startswith("isal")], code)


@pytest.mark.parametrize(
    ("logs", "sentence"),
    [
        ({"watch": "a.parquet"}, "events 'watch': expected an event log of the model, got none of that name."),
        ({"watched": "none.parquet"}, "expected at least one file"),
        ({"watched": 7}, "events 'watched': expected files, or {table: NAME, catalog: {uri: ..., ...}} of an event"),
        ({"watched": []}, "events 'watched': expected files"),
        ({"watched": {"catalog": {}}}, "events 'watched': expected files"),
        ("a.parquet", "events: expected watched, visits/*.parquet and what is read for each, got 'a.parquet'."),
        ({"watched": "words.parquet"}, "column 'seen_item': expected list<long> as in the training, got large_list<"),
        ({"watched": "text.parquet"}, "key 'user': expected int64 as in the table, got large_string."),
    ],
)
def test_logs_that_do_not_fit_are_refused(logs, sentence, folder, log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = log.column("user").cast(pa.string())
    pq.write_table(log.set_column(log.schema.names.index("user"), "user", texts), "text.parquet")
    words = log.column("item").cast(pa.string())
    pq.write_table(log.set_column(log.schema.names.index("item"), "item", words), "words.parquet")
    with pytest.raises(ConfigError) as caught:
        LoadedModel(folder, logs=logs)
    assert sentence in str(caught.value)


@pytest.mark.nightly
def test_a_log_may_be_a_table_and_its_key_a_date(log, rows, exported, tmp_path):
    """Callers send a date as a time."""
    born = {"born": pa.array([date(2000, 1, 1) + timedelta(user) for user in range(30)])}
    log, rows = (
        one.append_column(
            "born",
            pa.array(
                [None if user is None else born["born"][user] for user in one.column("user").to_pylist()], pa.date32()
            ),
        )
        for one in (log, rows)
    )
    history = SEEN | {"on": "born"}
    sparse = [SCHEMA.sparse[1].model_dump()]
    features = FeatureSchema.model_validate({"sparse": sparse, "histories": [history]})
    schema = pa.schema([*rows.schema, ("seen_item", pa.large_list(pa.int32()))])
    config = DLRMConfig(embedding_width=4, top_mlp=(8,), interaction="cat")
    weights, plan = exported(features, schema, config)
    folder = pack(tmp_path / "model", weights, plan, config, schema, logs=features.logs)
    properties = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/tables"}
    dated = by_day(log)
    stored(Warehouse(WarehouseConfig(catalog=properties), tmp_path), dated, "clicks")
    reading = LoadedModel(folder, logs={"watched": {"table": "clicks", "catalog": properties}})
    frame = raw_frame(rows, reading.inputs)
    found = reading.complete(reading.table_of(frame)).column("seen_item").to_pylist()
    assert set(frame) == {"born", "at"}
    assert found == cut(rows, dated, ["born"], 600, 5)
    assert sum(map(len, found)) > 1_000


def test_a_model_without_histories_takes_no_log(exported, rows, tmp_path):
    schema = FeatureSchema.model_validate({"sparse": SCHEMA.model_dump()["sparse"][:1], "histories": [SEEN]})
    config = DLRMConfig(embedding_width=4, top_mlp=(8,), interaction="cat")
    weights, plan = exported(schema, rows.schema, config)
    folder = pack(tmp_path / "model", weights, plan, config, rows.schema, logs=schema.logs)
    with pytest.raises(ConfigError, match="events: expected a model with histories or windows, got none of them"):
        LoadedModel(folder, logs={"watched": "a.parquet"})
