"""The application of one process, called in this one: routes, limits, errors, and changes of version under load."""

import asyncio
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.config import DLRMConfig
from pipeline.config.files import ROOT
from pipeline.inference.model import LoadedModel
from pipeline.inference.served import ServedModel
from pipeline.registration.register import pack
from pipeline.serving.app import LoadedVersion, ScoringApp
from pipeline.serving.bodies import ARROW, write_arrow
from pipeline.serving.config import ServedVersion, ServingConfig
from pipeline.serving.metrics import FOLDER, ServerMetrics
from pipeline.serving.row_log import RowLog
from pipeline.transforms.schema import FeatureSchema

SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [{"columns": ["user", "tags", "at"], "transforms": [{"kind": "sigrid_hash", "size": 50}]}],
    }
)
COLUMNS = pa.schema({"age": pa.float64(), "user": pa.int64(), "tags": pa.list_(pa.string()), "at": pa.string()})
ROWS: dict[str, list[Any]] = {
    "age": [20.0, 31.5, None],
    "user": [[2**61 + 1], [], [7]],
    "tags": [["a", "b"], [], None],
    "at": ["x", "y", None],
}
CONFIG = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(
    app: ScoringApp, path: str, body: Any = None, method: str | None = None, parts: int = 1, **headers: str
) -> Reply:
    """Sends a request to an application; a body that is no bytes goes as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {"host": "localhost:80", "content-type": "application/json"} | headers
    size = max(-(-len(data) // parts), 1)
    pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def take(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method or ("GET" if body is None else "POST"), "path": path,
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    await app(scope, receive, take)
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], found, b"".join(message.get("body", b"") for message in rest))


def ask(app: ScoringApp, path: str, body: Any = None, **options: Any) -> Reply:
    return asyncio.run(send(app, path, body, **options))


def test_the_log_keeps_columns_that_the_model_does_not_read(model, tmp_path):
    """In all protocols, with null for what is absent or of another type. No answer changes."""
    kept = ServedModel(model.loaded, {"row": "long", "shown": "timestamp", "age": "long"})
    log = RowLog(tmp_path / "log", 1 << 20, lambda written, dropped: None)
    app = ScoringApp(ServingConfig(), "demo", ServerMetrics(), log)
    app.swap(LoadedVersion(version(3), kept))
    plain = serving(model)
    more = {"row": [1, 2, "x"], "shown": ["2025-03-01 10:00:00", None, "2025-03-02"]}
    records = [dict(zip(more | ROWS, values, strict=True)) for values in zip(*(more | ROWS).values(), strict=True)]
    whole = pa.table(
        {"row": [4, None, 6]}
        | {name: pa.array(ROWS[name], COLUMNS.field(name).type) for name in ("tags", "at", "age")}
        | {"user": [1, 2, 3]}
    )
    tensors = [
        {"name": "age", "shape": [1], "datatype": "FP64", "data": [20.0]},
        {"name": "user", "shape": [1], "datatype": "INT64", "data": [7]},
        {"name": "tags", "shape": [1, 1], "datatype": "BYTES", "data": [["a"]]},
        {"name": "at", "shape": [1], "datatype": "BYTES", "data": ["x"]},
        {"name": "row", "shape": [1], "datatype": "INT64", "data": [7]},
    ]
    candidates = [{name: one[name] for name in ("tags", "at", "row")} for one in records[:2]]
    user = {"age": 20.0, "user": 7, "shown": "2025-03-05"}
    for path, body in (
        ("/invocations", {"inputs": ROWS | more}),
        ("/invocations", {"dataframe_records": records}),
        (
            "/invocations",
            {"dataframe_records": [{"user": [2**61 + 1], "at": "y", "tags": None, "age": None, "row": None}]},
        ),
        ("/invocations", write_table(whole)),
        ("/v2/models/demo/infer", {"inputs": tensors}),
        ("/rank", {"user": user, "candidates": candidates}),
        ("/rank", {"user": user | {"row": 9}, "candidates": [{"tags": None, "at": None}]}),
        ("/rank", {"user": user, "candidates": []}),
        ("/rank", {"user": user, "candidates": {"tags": [["a"]], "at": ["x"], "row": ["x"]}}),
    ):
        options = {"content_type": ARROW} if isinstance(body, bytes) else {}
        answer = ask(app, path, body, **options)
        assert answer.status == 200, answer.body
        assert answer.body == ask(plain, path, body, **options).body
    log.close()
    found = pa.concat_tables([pq.read_table(file) for file in (tmp_path / "log").iterdir()])
    assert found["row"].to_pylist() == [1, 2, None] * 2 + [None] + [4, None, 6] + [7] + [1, 2] + [9] + [None]
    day = datetime.datetime(2025, 3, 5)
    times = [datetime.datetime(2025, 3, 1, 10), None, datetime.datetime(2025, 3, 2)]
    assert found["shown"].to_pylist() == times * 2 + [None] * 5 + [day] * 4
    assert found.schema.field("age").type == pa.float64()


def write_table(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return bytes(sink.getvalue().to_pybytes())


@pytest.fixture
def model(tmp_path, exported) -> ServedModel:
    weights, plan = exported(SCHEMA, COLUMNS, CONFIG, spread=1.0)
    return ServedModel(LoadedModel(pack(tmp_path / "model", weights, plan, CONFIG, COLUMNS)))


def version(number: int) -> ServedVersion:
    return ServedVersion(model="demo", version=number, run_id=f"run{number}", snapshot="77")


def serving(model: Any, **options: Any) -> ScoringApp:
    app = ScoringApp(ServingConfig(**options), "demo", ServerMetrics())
    if model is not None:
        app.swap(LoadedVersion(version(3), model))
    return app


def probabilities(reply: Reply) -> list[float]:
    assert reply.status == 200, reply.body
    return [row["probability"] for row in reply.json["predictions"]]


def test_all_protocols_give_the_probabilities_of_the_model(model):
    expected = model.loaded.probabilities(ROWS).tolist()
    assert np.std(expected) > 1e-3
    app = serving(model)
    assert probabilities(ask(app, "/invocations", {"inputs": ROWS}, parts=3)) == expected
    ids = [2**61 + 1, None, 7]
    table = pa.table({n: pa.array(values, COLUMNS.field(n).type) for n, values in (ROWS | {"user": ids}).items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    sent = sink.getvalue().to_pybytes()
    found = ask(app, "/invocations", sent, content_type=ARROW)
    assert (found.status, found.headers["content-type"]) == (200, ARROW)
    assert pa.ipc.open_stream(found.body).read_all()["probability"].to_pylist() == expected
    assert probabilities(ask(app, "/invocations", sent, content_type=ARROW, accept="application/json")) == expected
    found = ask(app, "/invocations", {"inputs": ROWS}, accept=ARROW)
    assert pa.ipc.open_stream(found.body).read_all()["probability"].to_pylist() == expected
    tensors = [
        {"name": "age", "shape": [3, 1], "datatype": "FP64", "data": ROWS["age"]},
        {"name": "user", "shape": [3], "datatype": "INT64", "data": ids},
        {"name": "tags", "shape": [3, 2], "datatype": "BYTES", "data": [["a", "b"], [None, None], [None, None]]},
        {"name": "at", "shape": [3], "datatype": "BYTES", "data": ROWS["at"]},
    ]
    found = ask(app, "/v2/models/demo/infer", {"id": "7", "inputs": tensors})
    output = {"name": "probability", "shape": [3], "datatype": "FP64", "data": expected}
    assert found.json == {"model_name": "demo", "model_version": "3", "id": "7", "outputs": [output]}
    candidates = [{"user": user, "at": at} for user, at in zip(ids, ROWS["at"], strict=True)]
    found = ask(app, "/rank", {"user": {"age": 5, "tags": ["a"]}, "candidates": candidates})
    same = model.loaded.probabilities(ROWS | {"age": [5.0] * 3, "tags": [["a"]] * 3})
    assert probabilities(found) == pytest.approx(same.tolist(), abs=1e-7)
    assert found.json["order"] == np.argsort(-same).tolist()


TENSORS = [
    {"name": "age", "shape": [1], "datatype": "FP64", "data": [20.0]},
    {"name": "user", "shape": [1], "datatype": "INT64", "data": [7]},
    {"name": "tags", "shape": [1, 1], "datatype": "BYTES", "data": [["a"]]},
    {"name": "at", "shape": [1], "datatype": "BYTES", "data": ["x"]},
]


def test_the_version_that_serves_may_be_named(model):
    app = serving(model)
    base, named = "/v2/models/demo", "/v2/models/demo/versions/3"
    assert ask(app, f"{named}/infer", {"inputs": TENSORS}).body == ask(app, f"{base}/infer", {"inputs": TENSORS}).body
    for rest in ("", "/ready"):
        found = ask(app, named + rest)
        assert (found.status, found.body) == (200, ask(app, base + rest).body)
    for other in ("4", "03", "three", ""):
        for path, body in ((f"{base}/versions/{other}/infer", {"inputs": TENSORS}), (f"{base}/versions/{other}", None)):
            found = ask(app, path, body)
            assert (found.status, found.json["error"]) == (
                404, f"version '{other}': expected 3, which serves. Ask for that one.",
            )  # fmt: skip
    assert ask(app, f"{named}/other").status == 404
    assert ask(app, "/v2/models/another/versions/3/infer", {"inputs": TENSORS}).status == 404
    assert ask(app, f"{named}/infer").status == 405


@pytest.mark.parametrize("outputs", [[], None, [{"name": "probability"}]])
def test_the_output_may_be_named(model, outputs):
    request = {"inputs": TENSORS, "outputs": outputs}
    app = serving(model)
    plain = ask(app, "/v2/models/demo/infer", {"inputs": TENSORS})
    assert ask(app, "/v2/models/demo/infer", request).body == plain.body


@pytest.mark.parametrize(
    "outputs", [[{"name": "logit"}], [{"name": "probability"}, {}], [5], "probability", {"name": "x"}]
)
def test_another_output_is_refused(model, outputs):
    found = ask(serving(model), "/v2/models/demo/infer", {"inputs": TENSORS, "outputs": outputs})
    assert found.status == 400
    assert found.json["error"].startswith("outputs: expected ")


def test_health_says_why_another_version_should_answer(model):
    app = serving(model)
    assert ask(app, "/health").json == {"status": "ready", "version": 3}
    app.stale = "version 4 is being loaded"
    found = ask(app, "/health")
    assert (found.status, found.json) == (
        200, {"status": "stale", "version": 3, "reason": "version 4 is being loaded"},
    )  # fmt: skip


def test_arrow_columns_may_be_of_other_types_than_the_models(model):
    given = {"age": pa.array([20, 31, None], pa.int8()), "user": pa.array([7, None, 9], pa.int32())}
    given |= {"tags": pa.array([["a"], [], None], pa.large_list(pa.large_string()))}
    given |= {"at": pa.array(["x", "y", None]).dictionary_encode()}
    rows = {name: values.to_pylist() for name, values in given.items()}
    assert model.loaded.probabilities(pa.table(given)).tolist() == model.loaded.probabilities(rows).tolist()


def test_a_damaged_arrow_body_is_refused(model):
    app = serving(model)
    table = pa.table({"at": ["some text", "more"], "tags": [["a"], ["b", "c"]]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole = sink.getvalue().to_pybytes()
    wild = whole.replace(np.array([0, 9, 13], np.int32).tobytes(), np.array([0, 9, 1 << 30], np.int32).tobytes())
    assert wild != whole
    for body in (wild, whole[:100], b"", b"x" * 50):
        found = ask(app, "/invocations", body, content_type=ARROW)
        assert (found.status, found.json["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert found.json["message"].startswith("body: expected an Arrow IPC stream")


def test_every_answer_says_which_version_made_it(model):
    app = serving(model)
    for path, body in (("/ping", None), ("/invocations", {"inputs": ROWS}), ("/invocations", b"{"), ("/no", None)):
        assert ask(app, path, body).headers["x-model-version"] == "3"
    assert ask(app, "/version").json == {"model": "demo", "version": 3, "run_id": "run3", "snapshot": "77"}


def test_a_server_without_a_version_is_alive_and_not_ready(model):
    app = serving(None)
    assert ask(app, "/v2/health/live").json == {"live": True}
    for path in ("/ping", "/health", "/v2/health/ready", "/v2/models/demo/ready", "/version"):
        assert ask(app, path).status == 503
    found = ask(app, "/invocations", {"inputs": ROWS})
    assert (found.status, found.headers["retry-after"]) == (503, "1")
    app.swap(LoadedVersion(version(3), model))
    for path in ("/ping", "/health", "/v2/health/ready", "/v2/models/demo/ready", "/version"):
        assert ask(app, path).status == 200
    assert ask(app, "/v2/models/demo").json["inputs"][0] == {"name": "age", "datatype": "FP64", "shape": [-1]}


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/nothing", {}, 404),
        ("/invocations", {}, 405),
        ("/ping", {"body": {}}, 405),
        ("/invocations", {"body": {}, "content_type": "text/csv"}, 415),
        ("/invocations", {"body": {}, "content_type": "application/json; charset=latin-1"}, 415),
        ("/rank", {"body": {}, "content_type": ARROW}, 415),
        ("/rank", {"body": {"user": {}}}, 400),
        ("/v2/models/demo/infer", {"body": {"inputs": []}}, 400),
        ("/v2/models/demo/infer", {"body": b"["}, 400),
        ("/invocations", {"body": b"x" * 2_000}, 413),
        ("/ping", {"origin": "http://localhost"}, 403),
        ("/ping", {"host": "evil.example:80"}, 403),
    ],
)
def test_what_is_refused(model, path, options, status):
    found = ask(serving(model, body_bytes=1_000), path, **options)
    assert found.status == status
    assert found.json["error" if path.startswith("/v2") else "message"]


def test_a_server_may_have_names(model):
    app = serving(model, host="0.0.0.0", hosts=("scores.example",))
    assert [ask(app, "/ping", host=host).status for host in ("scores.example:80", "localhost", "other")] == [
        200,
        200,
        403,
    ]
    assert ask(serving(model, host="0.0.0.0"), "/ping", host="other").status == 200


class Slow:
    """A model that waits until it is told."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.go, self.begun = model, threading.Event(), threading.Semaphore(0)
        self.columns = model.columns

    def read_invocation(self, body: bytes) -> pa.Table:
        self.begun.release()
        assert self.go.wait(30)
        return self.model.read_invocation(body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_a_full_queue_refuses_at_once_and_loses_nothing(model):
    slow = Slow(model)
    app = serving(slow, queue=2, deadline_seconds=30)

    async def together() -> list[Reply]:
        waiting = [asyncio.create_task(send(app, "/invocations", {"inputs": ROWS})) for _ in range(2)]
        await asyncio.to_thread(slow.begun.acquire)
        refused = await send(app, "/invocations", {"inputs": ROWS})
        alive = await send(app, "/ping")
        depth = app.metrics.text()
        slow.go.set()
        assert b"dlrm_queue_depth 2.0" in depth
        return [refused, alive, *await asyncio.gather(*waiting)]

    refused, alive, *answered = asyncio.run(together())
    assert (refused.status, refused.headers["retry-after"], alive.status) == (503, "1", 200)
    assert [reply.status for reply in answered] == [200, 200]
    assert b"dlrm_queue_depth 0.0" in app.metrics.text()


def test_a_request_past_its_deadline_ends_and_the_next_is_answered(model):
    slow = Slow(model)
    app = serving(slow, deadline_seconds=0.05)

    async def together() -> list[Reply]:
        both = await asyncio.gather(*(send(app, "/invocations", {"inputs": ROWS}) for _ in range(2)))
        slow.go.set()
        while app.queue.depth:
            await asyncio.sleep(0.001)
        app.config = ServingConfig()
        return [*both, await send(app, "/invocations", {"inputs": ROWS})]

    found = asyncio.run(together())
    assert [reply.status for reply in found] == [504, 504, 200]
    assert found[0].json["error_code"] == "DEADLINE_EXCEEDED"


def test_a_failing_model_shows_no_traceback(model, caplog):
    class Broken:
        columns = model.columns

        def read_invocation(self, body: bytes) -> pa.Table:
            raise RuntimeError("secret place")

    found = ask(serving(Broken()), "/invocations", {"inputs": ROWS})
    assert (found.status, found.json["error_code"]) == (500, "INTERNAL_ERROR")
    assert b"secret" not in found.body
    assert "secret place" in caplog.text


class Constant:
    """A version whose answers are its number: an answer of two versions would show."""

    def __init__(self, number: int) -> None:
        self.number = number

    def read_invocation(self, body: bytes) -> pa.Table:
        return pa.table({"rows": [self.number] * len(json.loads(body)["inputs"]["age"])})

    def score_rows(self, rows: pa.Table) -> Any:
        time.sleep(0)
        return np.array(rows["rows"].to_pylist(), float) + self.number


@pytest.mark.nightly
def test_an_answer_is_of_one_version_while_versions_change():
    app = serving(Constant(3))

    async def under_load() -> list[Reply]:
        asked = []
        for number in range(300):
            asked += [asyncio.create_task(send(app, "/invocations", {"inputs": {"age": [1.0] * 50}})) for _ in range(3)]
            await asyncio.sleep(0)
            app.swap(LoadedVersion(version(number), Constant(number)))
            if number % 50 == 0:
                await asked[-1]  # else a fast machine makes all changes before the first answer
        return await asyncio.gather(*asked)

    app.queue.limit = 2_000
    found = asyncio.run(under_load())
    assert {reply.status for reply in found} == {200}
    made_by = [int(reply.headers["x-model-version"]) for reply in found]
    assert [set(probabilities(reply)) for reply in found] == [{2.0 * number} for number in made_by]
    assert len(set(made_by)) > 3


def test_metrics_count_requests_rows_and_versions(model):
    app = serving(model)
    for _ in range(2):
        ask(app, "/invocations", {"inputs": ROWS})
    ask(app, "/invocations", b"{")
    ask(app, "/anything")
    app.swap(LoadedVersion(version(4), model))
    lines = ask(app, "/metrics").body.decode().splitlines()
    assert 'dlrm_requests_total{path="/invocations",status="200"} 2.0' in lines
    assert 'dlrm_requests_total{path="/invocations",status="400"} 1.0' in lines
    assert 'dlrm_requests_total{path="other",status="404"} 1.0' in lines
    assert 'dlrm_request_seconds_count{path="/invocations"} 3.0' in lines
    assert "dlrm_rows_total 6.0" in lines
    assert 'dlrm_ready_processes{model="demo",version="3"} 0.0' in lines
    assert 'dlrm_ready_processes{model="demo",version="4"} 1.0' in lines
    assert "dlrm_reloads_total 1.0" in lines


def test_a_process_killed_while_it_makes_its_file_hides_no_counts(tmp_path):
    """Such a file stays empty for good."""
    code = (
        "from pipeline.serving.metrics import ServerMetrics; from pathlib import Path; import sys;"
        "ServerMetrics(Path(sys.argv[1])).rows.inc(7)"
    )
    environment = os.environ | {FOLDER: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, cwd=ROOT)
    (tmp_path / "counter_1.db").touch()
    assert b"dlrm_rows_total 7.0" in ServerMetrics(tmp_path).text()


def test_an_arrow_answer_has_one_column():
    assert pa.ipc.open_stream(write_arrow(np.array([0.5]))).read_all().to_pydict() == {"probability": [0.5]}
