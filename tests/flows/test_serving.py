"""The registered model behind `mlflow models serve`, over HTTP, with numbers, times, ids, strings and lists."""

import datetime
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.pyfunc import PyFuncModel

from flows.end_to_end import end_to_end
from pipeline.config import RunConfig, load
from pipeline.inference.model import LoadedModel
from pipeline.jobs.training import finish
from pipeline.jobs.training.job import resolve_job
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.registration.register import raw_frame

DAYS, DAY_ROWS = 4, 150
BIG = 2**62
DEFAULTS = {"num_share": 0.25, "cat_city": "Oslo", "list_items": [BIG, 7]}


def source(folder: Path) -> Path:
    """Rows with nulls in every column, ids that no float holds, and labels that follow two of the columns."""
    random = np.random.default_rng(5)
    count = DAYS * DAY_ROWS
    share, user = random.random(count), random.integers(0, 40, count)
    start = datetime.datetime(2025, 1, 6, 12, 30)

    def some(values: list[Any]) -> list[Any]:
        return [None if lost else value for value, lost in zip(values, random.random(count) < 0.1, strict=True)]

    words = ["Oslo", "\u00c5lesund", "", "\u6771\u4eac"]
    rows = {
        "day": [f"2025-01-{6 + row // DAY_ROWS:02}" for row in range(count)],
        "label": (random.random(count) < 0.2 + 0.3 * share + 0.3 * (user % 2)).astype(int).tolist(),
        "num_share": some(share.tolist()),
        "num_since": some([start + datetime.timedelta(minutes=row) for row in range(count)]),
        "cat_user": some((user + BIG).tolist()),
        "cat_city": some([words[number] for number in random.integers(0, 4, count)]),
        "list_items": some([(random.integers(0, 9, size) + BIG).tolist() for size in random.integers(0, 9, count)]),
        "list_terms": some([[words[i] for i in random.integers(0, 4, size)] for size in random.integers(0, 4, count)]),
    }
    types = {"num_since": pa.timestamp("us"), "cat_user": pa.int64(), "list_items": pa.list_(pa.int64())}
    pq.write_table(
        pa.table({name: pa.array(values, types.get(name)) for name, values in rows.items()}), folder / "rows.parquet"
    )
    return folder / "rows.parquet"


def configured(file: Path) -> RunConfig:
    """The smoke config with that source."""
    hashed = {"kind": "sigrid_hash", "size": 1_000}
    return load(
        "configs/smoke.yaml",
        {
            "name": "served",
            "source": {"path": str(file), "day_column": "day"},
            "features.dense": [{"columns": ["num_*"]}],
            "features.sparse": [
                {"columns": ["cat_*"], "transforms": [hashed]},
                {"columns": ["list_*"], "pooling": "mean", "transforms": [{"kind": "first_x", "limit": 5}, hashed]},
            ],
            "evaluation": {},
            "preprocessing.executor": "inline",
            "training": {"world_size": 1, "batch_rows": 50},
            "registration.defaults": DEFAULTS,
        },
    )


class Served(NamedTuple):
    """A model in three forms: behind a server, loaded by MLflow, and as a folder."""

    address: str
    pyfunc: PyFuncModel
    loaded: LoadedModel
    rows: pa.Table
    """Raw rows of the trainer's probe."""
    probe: list[float]

    def columns(self, rows: pa.Table | None = None) -> dict[str, list[Any]]:
        """Returns rows as JSON can hold them, a list of values for each column. By default, the rows of the probe."""
        frame = raw_frame(self.rows if rows is None else rows, self.loaded.columns)
        return {name: [_json(value) for value in frame[name]] for name in frame.columns}

    def ask(self, body: Any, kind: str = "application/json") -> tuple[int, Any]:
        """Returns status and answer. Sends a body of bytes as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.address + "/invocations", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read(), parse_constant=_never)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def scores(self, body: Any) -> list[float]:
        """Returns the probabilities of a valid request."""
        status, answer = self.ask(body)
        assert status == 200, answer
        return [row["probability"] for row in answer["predictions"]]


def _json(value: Any) -> Any:
    if value is None or isinstance(value, list):
        return value
    if isinstance(value, datetime.datetime):
        return None if value != value else value.isoformat()
    return None if isinstance(value, float) and math.isnan(value) else value


def _never(constant: str) -> float:
    raise AssertionError(f"{constant} with status 200")


@pytest.fixture(scope="module")
def served(prefect: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(home))
        config = configured(source(home))
        result = end_to_end(config=config)
        job = resolve_job(Workspace(config), None, False)
        rows = finish._read_first_rows(Worker(job.data["test"], Workspace(config).warehouse), 256)
        tracker = Workspace(config).tracking
    run = next((home / "runs").iterdir())
    name = f"models:/served/{result['model']['version']}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Path(sys.executable).parent
    environment = os.environ | {"MLFLOW_TRACKING_URI": tracker.uri, "PATH": f"{found}:{os.environ['PATH']}"}
    words = ["models", "serve", "-m", name, "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(found / "mlflow"), *words], env=environment, cwd=home, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address + "/ping", process, home / "server.log")
        mlflow.set_tracking_uri(tracker.uri)
        pyfunc = mlflow.pyfunc.load_model(name)
        yield Served(address, pyfunc, LoadedModel(run / "model"), rows, json.loads((run / "probe.json").read_text()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen, log: Path, seconds: float = 400.0) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=20):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-3000:]}")


def as_split(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        "dataframe_split": {
            "columns": list(columns),
            "data": [list(row) for row in zip(*columns.values(), strict=True)],
        }
    }


def as_records(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {"dataframe_records": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}


def as_inputs(columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {"inputs": columns}


FORMS = [as_split, as_records, as_inputs]


@pytest.mark.slow
def test_trainer_pyfunc_and_server_give_the_same_scores(served):
    assert len(served.probe) == DAY_ROWS
    assert all(served.rows.column(name).null_count for name in served.loaded.columns)
    expected = served.loaded.score(served.rows)
    assert np.abs(expected - np.array(served.probe)).max() <= 1e-6
    assert expected.std() > 1e-3
    columns = served.columns()
    for form in FORMS:
        assert np.abs(np.array(served.scores(form(columns))) - expected).max() <= 1e-12, form
    for rows in (raw_frame(served.rows, served.loaded.columns), columns, json.dumps(columns)):
        assert np.abs(served.pyfunc.predict(rows)["probability"] - expected).max() <= 1e-12


@pytest.mark.slow
def test_rows_unlike_any_of_training(served):
    """Unknown ids and strings, nulls, empty and long lists score as the same rows in the warehouse would."""
    odd = {
        "num_share": [None, -1e30, 1e300, 5.0],
        "num_since": [None, datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1), None],
        "cat_user": [None, -5, 2**63 - 1, -(2**63)],
        "cat_city": [None, "", "nowhere", "a" * 100_000],
        "list_items": [None, [], list(range(1_000_000)), [-1] * 5],
        "list_terms": [None, [], ["x"] * 1_000, ["\u6771"]],
    }
    rows = pa.table({name: pa.array(values, served.rows.schema.field(name).type) for name, values in odd.items()})
    expected = served.loaded.score(rows)
    assert np.isfinite(expected).all()
    columns = served.columns(rows)
    for form in FORMS:
        assert np.abs(np.array(served.scores(form(columns))) - expected).max() <= 1e-12, form
    short = served.loaded.score(rows.set_column(4, "list_items", pa.array([None, [], list(range(5)), [-1] * 5])))
    assert short.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_missing_columns_take_the_default_extra_ones_are_ignored(served, form):
    columns = served.columns(served.rows.slice(0, 3))
    filled = columns | {name: [value] * 3 for name, value in DEFAULTS.items()}
    expected = served.loaded.probabilities(filled).tolist()
    absent = {name: values for name, values in columns.items() if name not in DEFAULTS}
    assert served.scores(form(absent)) == expected
    assert served.scores(form(absent | {"unused": [{"a": 1}, None, "x"]})) == expected
    bad = {"num_share": ["much"] * 3, "cat_city": [5, ["Oslo"], True], "list_items": ["1", 5, [0.5]]}
    assert served.scores(form(columns | bad)) == expected


@pytest.mark.slow
def test_no_rows(served):
    for body in (as_split({name: [] for name in served.columns()}), as_inputs({name: [] for name in served.columns()})):
        assert served.ask(body) == (200, {"predictions": []})
    status, answer = served.ask({"dataframe_records": []})
    assert status == 400
    assert "Add them; a batch without rows names them, too." in answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cat_user": ["5", None, None]}, "row 0, column 'cat_user': expected long, got '5'. Correct the value, or leave it null."),
        ({"cat_user": [5, None, 2**60]}, "row 2, column 'cat_user': expected long, got 1.152921504606847e+18. A null in the column made it a float; send ids as [id]."),
        ({"cat_user": [1, 2, 2**64]}, "row 2, column 'cat_user': expected long, got 18446744073709551616. Correct the value, or leave it null."),
        ({"num_since": [None, 5, None]}, "row 1, column 'num_since': expected timestamp, got "),
        ({"num_since": [None, "soon", None]}, "row 1, column 'num_since': expected timestamp, got 'soon'. Send ISO 8601 such as 2025-03-04T12:00:00Z, or a type with a unit such as Arrow's timestamp, or null."),
        ({"list_terms": [["a"], ["a", 1], None]}, "row 1, column 'list_terms': expected list<string>, got ['a', 1]. Correct the value, or leave it null."),
        ({"list_terms": ["a", None, None]}, "row 0, column 'list_terms': expected list<string>, got 'a'. Correct the value, or leave it null."),
        ({"list_terms": None}, "input: expected columns cat_city, cat_user, list_items, list_terms, num_share, num_since, got none named list_terms. Add them."),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_with_the_reason(served, change, sentence):
    columns = {name: values for name, values in (served.columns(served.rows.slice(0, 3)) | change).items() if values}
    for form in FORMS:
        status, answer = served.ask(form(columns))
        assert status == 400, form
        assert sentence in json.loads(answer)["message"], form


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b"null", b"[]", b"5", b"{}", b'"text"', b'{"rows": []}',
        b'{"inputs": {"cat_user": [1]}, "instances": []}', b'{"inputs": 5}', b'{"inputs": []}', b'{"inputs": {"cat_user": 1, "num_share": [1, 2]}}',
        b'{"inputs": {"cat_user": [1, 2], "num_share": [1]}}', b'{"inputs": "{"}', b'{"dataframe_records": {}}', b'{"dataframe_records": [5]}',
        b'{"dataframe_split": []}', b'{"dataframe_split": {"columns": ["cat_user"], "data": [[1, 2]]}}', b'{"dataframe_split": {"data": [[1]]}}',
        b'{"instances": [{"cat_user": [1]}, {"cat_user": [1, 2]}]}',
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(served, body):
    status, answer = served.ask(body)
    assert (status, bool(json.loads(answer)["message"])) == (400, True), answer


@pytest.mark.slow
def test_json_without_a_number(served):
    """NaN and infinity are not JSON, but Python reads them. NaN is missing, and the plan has a rule for infinity."""
    columns = served.columns(served.rows.slice(0, 3))
    assert served.scores(as_inputs(columns | {"num_share": [math.nan] * 3})) == served.scores(
        as_inputs(columns | {"num_share": [None] * 3})
    )
    assert all(map(math.isfinite, served.scores(as_inputs(columns | {"num_share": [math.inf, -math.inf, 1e308]}))))


@pytest.mark.slow
def test_other_kinds_of_content_are_refused(served):
    assert served.ask(b"a", "text/plain")[0] == 415
