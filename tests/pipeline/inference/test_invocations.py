"""Bodies of MLflow's protocol: the same answers and errors as MLflow's own server with the pyfunc, side by side."""

import asyncio
import datetime
import json
import random
from collections.abc import Callable
from typing import Any

import mlflow
import pyarrow as pa
import pytest
from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import scoring_server
from mlflow.pyfunc.model import _PythonModelPyfuncWrapper

from models.config import DLRMConfig
from pipeline.inference.invocations import InvocationReader, plain_columns
from pipeline.inference.mlflow_bodies import signature_of
from pipeline.inference.model import LoadedModel
from pipeline.inference.served import ServedModel
from pipeline.registration.register import pack, raw_frame
from pipeline.registration.scorer import Scorer
from pipeline.serving.app import LoadedVersion, ScoringApp
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.metrics import ServerMetrics
from pipeline.transforms.schema import FeatureSchema

BIG = 2**62 + 1
UNSIGNED = 2**64 - 5
"""An id of 64 bits without a sign: -5 of two's complement."""
SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age", "since"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["user", "city", "terms"], "transforms": [{"kind": "sigrid_hash", "size": 50}]},
            {"columns": ["tags"], "pooling": "mean", "transforms": [{"kind": "sigrid_hash", "size": 50}]},
        ],
    }
)
COLUMNS = pa.schema(
    {
        "age": pa.float64(), "since": pa.timestamp("us"), "user": pa.int64(), "city": pa.string(),
        "tags": pa.list_(pa.int64()), "terms": pa.list_(pa.string()),
    }
)  # fmt: skip
PLAIN: dict[str, list[Any]] = {
    "age": [25.0, 3, None, -1e300, True], "since": ["2025-01-02T12:30:00", None, "2020-02-29"],
    "user": [1, 2, 7, None, [5], [], [BIG], [UNSIGNED]], "city": ["Oslo", "", None, "\u6771\u4eac"],
    "tags": [[1, 2], [], None, [BIG], [None, 4], [UNSIGNED, 2**63]], "terms": [["a"], [], None, ["a", "b"]],
}  # fmt: skip
ODD = {
    "age": ["old", [1.0], 2**64, {"a": 1}, 1.5], "since": ["soon", 5, True, "3/4/2025", "now", "12:30", "2025", "1735732800", "20250102", "Jan 2 2025"], "user": [BIG, UNSIGNED, 2**64, 1.5, 3.0, "5", [1, 2], True],
    "city": [5, ["Oslo"], True, 1.5], "tags": [5, ["a"], [0.5], [[1]], "x"], "terms": ["a", ["a", 1], [None], 5],
}  # fmt: skip
CONFIG = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))


@pytest.fixture
def loaded(tmp_path, exported) -> LoadedModel:
    weights, plan = exported(SCHEMA, COLUMNS, CONFIG, spread=1.0)
    return LoadedModel(pack(tmp_path / "model", weights, plan, CONFIG, COLUMNS, defaults={"terms": ("z",)}))


Ask = Callable[[bytes], tuple[int, Any]]


def asking(app: Any) -> Ask:
    """Sends bodies to an application of this process and returns status and answer."""

    def ask(body: bytes) -> tuple[int, Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/invocations", "raw_path": b"/invocations", "root_path": "",
            "query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1", "server": ("localhost", 80),
        }  # fmt: skip
        asyncio.run(app(scope, receive, send))
        answer = json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
        return sent[0]["status"], answer

    return ask


@pytest.fixture
def mlflows(loaded) -> Ask:
    """MLflow's server with the pyfunc."""
    python_model = Scorer()
    python_model.loaded = loaded
    meta = Model(signature=ModelSignature.from_dict(signature_of(loaded.columns).to_dict()))
    model = mlflow.pyfunc.PyFuncModel(meta, _PythonModelPyfuncWrapper(python_model, None, meta.signature))
    return asking(scoring_server.init(model))


@pytest.fixture
def ours(loaded) -> Ask:
    app = ScoringApp(ServingConfig(), "demo", ServerMetrics())
    app.swap(LoadedVersion(ServedVersion(model="demo", version=3, run_id="r", snapshot=None), ServedModel(loaded)))
    return asking(app)


def bodies(draw: random.Random) -> dict[str, Any]:
    """Draws rows that are plain for the most part, in one of MLflow's four forms."""
    names = [name for name in PLAIN if draw.random() < 0.97]
    draw.shuffle(names)
    count = draw.choice((1, 1, 2, 3))
    columns = {}
    for name in names:
        odd = draw.random() < 0.12
        same = draw.random() < 0.5
        pool = PLAIN[name] + (ODD[name] if odd else [])
        columns[name] = [draw.choice(pool[:3] if same and not odd else pool) for _ in range(count)]
    if draw.random() < 0.1:
        columns["unused"] = [draw.choice(([1], None, {"a": "b"}, "x")) for _ in range(count)]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    match draw.choice(("split", "records", "inputs", "instances")):
        case "split":
            return {"dataframe_split": {"columns": list(columns), "data": [list(row.values()) for row in rows]}}
        case "records":
            if draw.random() < 0.2:
                rows[-1].pop(draw.choice(names), None)
            return {"dataframe_records": rows}
        case "inputs":
            return {"inputs": columns}
    return {"instances": rows}


def test_rows_get_the_answers_and_errors_of_mlflows_server(mlflows, ours):
    draw = random.Random(7)
    seen = {200: 0, 400: 0}
    for _ in range(200):
        request = bodies(draw)
        body = json.dumps(request).encode()
        (status, expected), (found_status, found) = mlflows(body), ours(body)
        assert found_status == status, (request, expected, found)
        seen[status] += 1
        if status == 200:
            assert found == expected, request
        elif "row " in found["message"].split(":")[0] or found["message"].startswith("input: expected columns"):
            assert found["message"] in expected["message"], request
    assert min(seen.values()) > 40


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[]", b"5", b"{}", b'"text"', b'{"rows": []}',
        b'{"inputs": {"user": [1]}, "instances": []}', b'{"inputs": 5}', b'{"inputs": []}', b'{"inputs": {"user": 1, "age": [1, 2]}}',
        b'{"inputs": {"user": [1, 2], "age": [1]}}', b'{"inputs": "{"}', b'{"dataframe_records": {}}', b'{"dataframe_records": [5]}',
        b'{"dataframe_split": []}', b'{"dataframe_split": {"columns": ["user"], "data": [[1, 2]]}}', b'{"dataframe_split": {"data": [[1]]}}',
        b'{"instances": [{"user": [1]}, {"user": [1, 2]}]}', b'{"dataframe_records": []}',
        b'{"inputs": {"age": [1], "since": [null], "user": [1], "city": ["\\ud800"], "tags": [null], "terms": [null]}}',
        b'{"inputs": {"age": [NaN, Infinity], "since": [null, null], "user": [1, 2], "city": ["a", null], "tags": [null, [1]], "terms": [null, null]}}',
        b'{"inputs": {"age": [1e400], "since": [null], "user": [1], "city": ["a"], "tags": [[1]], "terms": [["a"]]}, "params": {"a": 1}}',
        b'{"dataframe_split": {"columns": ["age", "age"], "data": [[1, 2]]}}',
        b'{"dataframe_split": {"columns": ["age", "since", "user", "city", "tags", "terms"], "data": []}}',
    ],
)  # fmt: skip
def test_odd_bodies_get_the_status_of_mlflows_server(mlflows, ours, body):
    (status, expected), (found_status, found) = mlflows(body), ours(body)
    assert found_status == status, (expected, found)
    if status == 200:
        assert found == expected
    else:
        assert found["message"]
        assert "Traceback" not in str(found)


def test_deep_nesting_is_refused(ours):
    assert ours(b'{"inputs":' + b"[" * 100_000)[0] == 400


def test_plain_rows_do_not_pass_through_mlflow(loaded, monkeypatch):
    reader = InvocationReader(loaded)
    monkeypatch.setattr(reader, "read_through_mlflow", None)
    times = [datetime.datetime(2025, 1, 2, 12, 30), None]
    columns = {name: values[:2] for name, values in PLAIN.items()} | {"since": times}
    rows = pa.table({name: pa.array(values, COLUMNS.field(name).type) for name, values in columns.items()})
    frame = raw_frame(rows, loaded.columns)
    split = json.loads(frame.to_json(orient="split", index=False, date_format="iso"))
    columns = {name: [row[place] for row in split["data"]] for place, name in enumerate(split["columns"])}
    records = [dict(zip(columns, row, strict=True)) for row in split["data"]]
    expected = loaded.table_of(frame)
    for request in ({"dataframe_split": split}, {"dataframe_records": records}, {"inputs": columns}):
        assert reader.read(json.dumps(request).encode()).equals(expected)


@pytest.mark.parametrize(
    "body",
    [
        b'{"dataframe_split": {"columns": ["a"], "data": [[1], [2, 3]]}}',
        b'{"dataframe_split": {"columns": ["a"], "data": [[1]], "index": [5]}}',
        b'{"inputs": {"a": [1], "b": [1, 2]}}',
        b'{"dataframe_records": [{"a": ["x"]}]}',
        b'{"inputs": {"a": ["x"]}}',
        b'{"instances": [{"a": 1}]}',
        b'{"inputs": {"a": [NaN]}}',
        b'{"inputs": {"a": [1, 2], "unknown": [1, [2]]}}',
    ],
)
def test_what_mlflow_may_read_otherwise_is_left_to_it(body):
    assert plain_columns(body, ["a", "b"]) is None
