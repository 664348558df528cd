"""Features in maps are trained on by key, and flattened tables train the same model."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.end_to_end import end_to_end
from flows.features import features
from flows.ingest import ingest
from flows.layout import layout
from flows.preprocess import preprocess
from flows.score import score
from flows.train import train
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.upkeep import layout as tables
from pipeline.jobs.workspace import Workspace
from storage.config import WarehouseConfig
from storage.reader import DAY
from storage.warehouse import Warehouse
from tests.homes import CONFIG, open_smoke, read_rows

rewrite = tables._rewrite_locked
HASHED = [{"kind": "first_x", "limit": 20}, {"kind": "sigrid_hash", "size": 10_000}]


def as_maps(rows: pa.Table) -> pa.Table:
    """The rows of the smoke run as a seeds' warehouse has them: a map of numbers, one of lists and one of scored lists."""
    dense = [name for name in rows.column_names if name.startswith("num_")]
    ids = [name for name in rows.column_names if name.startswith(("cat_", "list_"))]
    shaped = [
        {
            DAY: row[DAY],
            "label": row["label"],
            "dense": [(key, row[name]) for key, name in enumerate(dense) if row[name] is not None],
            "ids": [
                (key, value if isinstance(value, list) else [value])
                for key, name in enumerate(ids)
                if (value := row[name]) is not None
            ],
            "scored": [(7, [(one, one % 7 - 2.5) for one in sorted(set(row["list_interests"] or []))])],
        }
        for row in rows.to_pylist()
    ]
    kinds = {
        DAY: pa.date32(), "label": pa.int64(), "dense": pa.map_(pa.int32(), pa.float32()),
        "ids": pa.map_(pa.int32(), pa.list_(pa.int64())),
        "scored": pa.map_(pa.int32(), pa.map_(pa.int64(), pa.float32())),
    }  # fmt: skip
    return pa.Table.from_pylist(shaped, pa.schema(kinds))


@pytest.fixture(scope="module")
def logs(home: Path, smoke: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    own = Warehouse(WarehouseConfig(), home / "warehouse")
    snapshot = own.current("smoke")
    reader = own.reader(snapshot, own.schema(snapshot).names)
    for fragment in reader.fragments():
        pq.write_table(as_maps(reader.read(fragment).slice(0, 2_000)), folder / f"{fragment.day}.parquet")
    return folder


@pytest.fixture
def keys(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return {
        "name": "maps",
        "source": {"path": f"{logs}/*.parquet", "day_column": DAY},
        "features": {
            "label": "label",
            "dense": [{"columns": ["dense[0..3]", "dense[5]"]}],
            "sparse": [
                {"columns": ["ids[0..4]", "scored_7"], "transforms": HASHED},
                {"columns": ["scored[7]"], "name": "by_score", "weights": "{column}_scores", "transforms": HASHED},
                {"columns": ["ids[6, 8..9, 99]"], "name": "wide_{column}", "pooling": "mean", "transforms": HASHED},
            ],
        },
        "evaluation.true_probability": None,
        "evaluation.slices": [],
        "sweep.space": {}, "release": {"candidates": {}},
    }  # fmt: skip


@pytest.mark.nightly
def test_the_demo_by_maps_trains_the_same_model_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Any
) -> None:
    """Its log is a table of maps, and its features have their names by `map_keys`."""
    demo = "configs/generated.yaml"
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    ingest(demo, {"source.generator": {"start_day": "2025-01-06", "days": 7, "rows_per_day": 600}})
    own = Workspace(load(demo)).warehouse
    snapshot = own.current("generated")
    reader = own.reader(snapshot, own.schema(snapshot).names)
    for fragment in reader.fragments():
        rows = reader.read(fragment)
        pq.write_table(as_maps(rows), tmp_path / f"{fragment.day}.parquet")
    numbers = [name for name in rows.column_names if name.startswith("num_")]
    lists = [name for name in rows.column_names if name.startswith(("cat_", "list_"))]
    features = load(demo).features
    wanted = [[f"dense[{name}]" for name in group.columns] for group in features.dense]
    overrides = {
        "name": "maps", "source": {"path": f"{tmp_path}/*.parquet", "day_column": DAY},
        "features.map_keys": {
            "dense": {name: key for key, name in enumerate(numbers)}, "ids": {name: key for key, name in enumerate(lists)},
        },
        "features.dense.0.columns": wanted[0], "features.dense.1.columns": wanted[1],
        "features.sparse.0.columns": ["ids[cat_*]"], "features.sparse.1.columns": ["ids[list_*]"],
        "evaluation": {"baselines": []}, "sweep": {}, "release": {},
        "training.world_size": 1, "preprocessing.executor": "inline",
    }  # fmt: skip
    before = end_to_end(demo, overrides)
    assert (before["status"], before["train"]["rows"]) == ("ok", 3_000)
    assert layout(demo, overrides, action="flatten")["status"] == "ok"
    after = train(demo, overrides, force=True)
    assert after["train"]["weights_sha256"] == before["train"]["weights_sha256"]
    assert after["eval"]["ne"] == before["eval"]["ne"]
    names = own.schema(own.current("maps")).names
    assert {"dense_0", "ids_0", f"ids_{len(lists) - 1}"} < set(names)
    assert {"dense", "ids"}.isdisjoint(names)


@pytest.mark.slow
def test_a_flattened_table_trains_the_same_model(keys: dict[str, Any], plain: Any) -> None:
    before = end_to_end(CONFIG, keys)
    assert (before["status"], before["train"]["rows"]) == ("ok", 4_000)
    sha = before["train"]["weights_sha256"]
    own = open_smoke(keys).warehouse
    with pytest.MonkeyPatch.context() as cut:  # killed after a day

        def rewrite_one(workspace: Workspace, name: str, days: list[Any], *how: Any) -> None:
            rewrite(workspace, name, days[:1], *how)
            raise ZeroDivisionError

        cut.setattr(tables, "_rewrite_locked", rewrite_one)
        with pytest.raises(ZeroDivisionError):
            layout(CONFIG, keys, action="flatten")
    assert train(CONFIG, keys, force=True)["train"]["weights_sha256"] == sha
    done = layout(CONFIG, keys, action="flatten")
    assert (done["status"], len(done["days"]), done["maps"]) == ("ok", 3, ["dense", "ids", "scored"])
    names = own.schema(own.current("maps")).names
    assert {"dense_0", "ids_9", "scored_7", "scored_7_scores"} < set(names)
    assert {"dense", "ids", "scored"}.isdisjoint(names)
    after = train(CONFIG, keys, force=True)
    assert (after["train"]["weights_sha256"], after["eval"]["ne"]) == (sha, before["eval"]["ne"])
    assert train(CONFIG, keys)["status"] == "skipped"
    assert layout(CONFIG, keys, action="flatten")["status"] == "skipped"
    assert score(CONFIG, keys, version=1)["rows"] == 8_000


@pytest.mark.nightly
def test_a_day_in_maps_is_read_beside_flattened_ones(keys: dict[str, Any], logs: Path, plain: Any) -> None:
    """An ingest goes on as before, whatever layout the table has."""
    ingest(CONFIG, keys, day="2025-01-06")
    layout(CONFIG, keys, action="flatten")
    assert ingest(CONFIG, keys)["days_written"] == 3
    own = open_smoke(keys).warehouse
    found = read_rows(own, "maps", [DAY, "dense_0", "ids_9", "scored_7"])
    rows = pa.concat_tables([pq.read_table(path) for path in sorted(logs.glob("*.parquet"))]).to_pylist()
    expected = [
        (dict(row["dense"]).get(0), dict(row["ids"]).get(9), [one for one, _ in dict(row["scored"]).get(7, [])])
        for row in rows
    ]
    assert list(zip(*(found[name].to_pylist() for name in ("dense_0", "ids_9", "scored_7")), strict=True)) == expected


@pytest.mark.nightly
def test_keys_are_features_of_the_catalog(keys: dict[str, Any], logs: Path, plain: Any) -> None:
    ingest(CONFIG, keys)
    rows = pa.concat_tables([pq.read_table(path) for path in sorted(logs.glob("*.parquet"))]).to_pylist()
    found = {one["name"]: one for one in features(CONFIG, keys, action="list")["features"]}
    for name in ("dense_0", "ids_9"):
        column, _, key = name.rpartition("_")
        share = sum(dict(row[column]).get(int(key)) not in (None, []) for row in rows) / len(rows)
        assert found[name]["coverage"] == pytest.approx(share)
    assert [found[name]["kind"] for name in ("dense_0", "ids_9", "scored_7")] == ["number", "ids", "ids"]
    assert features(CONFIG, keys, action="deprecate", name="ids_9", reason="wrong")["status"] == "ok"
    with pytest.raises(ConfigError, match=r"'ids_9'.* deprecated"):
        train(CONFIG, keys)


def test_a_key_of_another_map_is_refused(keys: dict[str, Any], plain: Any) -> None:
    keys["features"]["sparse"][0]["columns"] = ["idz[0..4]"]
    with pytest.raises(ConfigError, match=r"column 'idz\[0..4\]': expected a column of the table"):
        ingest(CONFIG, keys)


@pytest.mark.nightly
def test_rows_are_chosen_by_a_key(keys: dict[str, Any], logs: Path, tmp_path: Path, plain: Any) -> None:
    ingest(CONFIG, keys)
    chosen = keys | {"filter": "dense_0 > 0.5", "preprocessing.executor": "inline"}
    found = preprocess(CONFIG, chosen)
    [record] = (tmp_path / "reads" / "maps").glob("*.json")
    shares = json.loads(record.read_text())["popularity"]
    assert 0.5 < shares["0.95"] <= 1  # the maps are read whole, and are most of the table
    rows = [row for path in sorted(logs.glob("*.parquet"))[:2] for row in pq.read_table(path).to_pylist()]
    assert found["rows"] == sum(dict(row["dense"]).get(0, 0) > 0.5 for row in rows) > 100
    layout(CONFIG, keys, action="flatten")
    assert preprocess(CONFIG, chosen)["order_hash"] == found["order_hash"]
    with pytest.raises(ConfigError, match=r"filter 'dens_0 > 0.5': expected columns of the table, got 'dens_0'"):
        preprocess(CONFIG, chosen | {"filter": "dens_0 > 0.5"})
