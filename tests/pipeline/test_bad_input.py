"""Bad rows through a real ingest and a real worker: each has a rule and a counter, and none crashes."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.selection import Selection
from pipeline.errors import DataError
from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.extract import IngestResult, extract
from pipeline.extraction.opening import SourceContext
from pipeline.preprocessing.dataset import DataSpec, fit_plan
from pipeline.preprocessing.epoch.memory import Arrays, PrivateWriter
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.kernels.hashing import sigrid_hash
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

INF, NAN, MANY = float("inf"), float("nan"), 10**6
HASHED = [{"kind": "sigrid_hash", "size": 1_000}]
BOUNDED = [{"kind": "clamp", "low": 0, "high": 999}]


def ingested(
    root: Path, schema: dict[str, Any], file: str = "rows.parquet", **config: Any
) -> tuple[IngestResult, DataSpec]:
    features = FeatureSchema.model_validate(schema)
    warehouse = Warehouse(WarehouseConfig(), root / "home")
    source = SourceConfig.model_validate({"path": file, "day": "2024-01-01"})
    context = SourceContext(source, features, warehouse, "events", root, root / "logs")
    result = extract(context, IngestConfig(**config))
    spec = DataSpec(
        warehouse=WarehouseConfig(), home=str(warehouse.home), snapshot=result.snapshot, label="label",
        selection=Selection(days=result.days_written or result.days_skipped), plan=build_plan(features, warehouse.schema(result.snapshot)),
        weight=features.weight,
    )  # fmt: skip
    return result, spec.model_copy(update={"plan": fit_plan(spec, warehouse)})


def transformed(spec: DataSpec) -> tuple[Arrays, Counter[str]]:
    worker, writer = Worker(spec), PrivateWriter()
    _, costs = worker.transform_split(SimpleNamespace(fragments=worker.fragments()), writer)  # type: ignore[arg-type]
    return writer.finish(), costs.counts


def written(root: Path, **columns: Any) -> int:
    table = pa.table(columns)
    pq.write_table(table, root / "rows.parquet")
    return table.num_rows


def lists(memory: Arrays) -> list[list[int]]:
    starts, ids = memory["0.starts"].tolist(), memory["0.ids"].tolist()
    return [ids[a:b] for a, b in pairwise(starts)]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    """NaN and null are filled, values beyond float32 become 0, and each is counted."""
    written(tmp_path, num=[1.0, NAN, INF, -INF, None, 1e300, 3.0], user=[1] * 7, label=[0, 1, 0, 1, 0, 1, 0])
    groups = {"dense": [{"columns": ["num"]}], "sparse": [{"columns": ["user"], "transforms": HASHED}]}
    _, spec = ingested(tmp_path, groups)
    memory, counts = transformed(spec)
    values = memory["0.dense"].ravel().tolist()
    assert values == pytest.approx(
        [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    )  # mean 2, deviation 1: those two are the known ones
    assert counts == {"fill_null num": 2, "not_finite num": 3}


def test_ids_of_any_size(tmp_path: Path) -> None:
    """Negative ids and those of 2^63 and more keep their 64 bits up to the hash. A bounded feature counts them."""
    signed = pa.array([-1, -(2**63), 0, 2**63 - 1, None])
    unsigned = pa.array([2**64 - 1, 2**63, 0, 2**63 - 1, None], pa.uint64())
    written(tmp_path, signed=signed, unsigned=unsigned, bounded=signed, label=[0, 1, 0, 1, 0])
    groups = [
        {"columns": ["signed", "unsigned"], "transforms": HASHED},
        {"columns": ["bounded"], "transforms": BOUNDED},
    ]
    _, spec = ingested(tmp_path, {"sparse": groups})
    memory, counts = transformed(spec)
    found = lists(memory)
    assert found[:5] == found[5:10]
    ids = np.array([-1, -(2**63), 0, 2**63 - 1])
    assert [row[0] for row in found[:4]] == sigrid_hash(ids, 0, 1_000).tolist()
    assert found[4] == []
    assert found[10:] == [[0], [0], [0], [999], []]
    assert counts == {"clamp bounded": 3}


def test_lists_of_any_length(tmp_path: Path) -> None:
    """Null and empty lists are empty bags. Inner nulls are dropped, ids may repeat, a million ids are cut and counted."""
    rows = [None, [], [7, 7, 7], list(range(MANY)), [None, 3], [-5]]
    written(tmp_path, items=pa.array(rows, pa.list_(pa.int64())), label=[0, 1] * 3)
    cut = [{"kind": "first_x", "limit": 5}, *BOUNDED]
    _, spec = ingested(tmp_path, {"sparse": [{"columns": ["items"], "transforms": cut}]})
    memory, counts = transformed(spec)
    assert lists(memory) == [[], [], [7, 7, 7], [0, 1, 2, 3, 4], [3], [0]]
    assert {name: count for name, count in counts.items() if "first_x" in name} == {"first_x items:0": MANY - 5}
    whole, counts = transformed(ingested(tmp_path, {"sparse": [{"columns": ["items"], "transforms": HASHED}]})[1])
    assert [len(bag) for bag in lists(whole)] == [0, 0, 3, MANY, 1, 1]
    assert counts == {}


def test_text_of_any_kind(tmp_path: Path) -> None:
    """Empty text is a value, null is not. Control characters and all of Unicode are kept."""
    texts = ["", None, "a\0b", "\U0001f600", "ä" * 10_000, " "]
    written(tmp_path, tag=texts, label=[0, 1] * 3)
    _, spec = ingested(tmp_path, {"sparse": [{"columns": ["tag"], "transforms": HASHED}]})
    memory, _ = transformed(spec)
    assert [len(bag) for bag in lists(memory)] == [1, 0, 1, 1, 1, 1]


def test_text_that_is_not_utf8_names_file_and_column(tmp_path: Path) -> None:
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 2, 5], np.int32)), pa.py_buffer(b"okd\xff\xfe"))
    written(tmp_path, name=pa.array(["a", "b"]), tag=broken, label=[0, 1])
    groups = {"sparse": [{"columns": ["tag"], "transforms": HASHED}]}
    with pytest.raises(DataError) as error:
        ingested(tmp_path, groups)
    assert str(error.value) == (
        "column 'tag' of 'rows.parquet': expected text in UTF-8, got other bytes. Write the file again in UTF-8."
    )
    (tmp_path / "rows.csv").write_bytes(b"tag,label\nok,0\nd\xff\xfe,1\n")
    with pytest.raises(
        DataError, match=r"^CSV file 'rows\.csv': expected readable values, got line 3: Invalid unicode"
    ):
        ingested(tmp_path, groups, "rows.csv")
    warehouse = Warehouse(WarehouseConfig(), tmp_path / "home")
    assert not warehouse.has_table("events")


@pytest.mark.parametrize("text", [False, True], ids=["numbers", "text"])
def test_rows_with_a_bad_label_or_weight_are_set_aside(tmp_path: Path, text: bool) -> None:
    values: list[Any] = [None, -1.0, 0.0, 1e6, NAN, 2.5, 0.5, 1.0, 1.0]
    weights = [None if value is None else f"{value}" for value in values] if text else values
    weights += ["x" if text else INF]
    rows = written(tmp_path, user=list(range(10)), weight=weights, label=pa.array([1, 1, 1, 1, 1, 1, 0, None, 2, 0]))
    groups = {"sparse": [{"columns": ["user"], "transforms": BOUNDED}], "weight": "weight"}
    result, spec = ingested(tmp_path, groups, max_quarantined_share=0.9)
    bad = "weight is not 0.0001 to 10,000"
    expected = {"label is null": 1, "label is not 0 or 1": 1, "weight is null": 1}
    expected |= {bad: 4, "weight is not a number": 1} if text else {bad: 5}
    assert dict(result.quarantined) == expected
    assert (rows, result.rows) == (10, 2)
    memory, _ = transformed(spec)
    assert memory["0.weights"].tolist() == [2.5, 0.5]
    assert lists(memory) == [[5], [6]]


def test_a_weight_is_no_feature(tmp_path: Path) -> None:
    written(tmp_path, user=[1, 2], weight=[1.0, 2.0], label=[0, 1])
    groups = {
        "sparse": [{"columns": ["user"], "transforms": BOUNDED}],
        "dense": [{"columns": ["w*"]}],
        "weight": "weight",
    }
    with pytest.raises(Exception, match="features: expected features other than the weight, got 'weight'"):
        ingested(tmp_path, groups)
