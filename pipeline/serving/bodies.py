"""Bodies of requests and answers: Arrow streams, the Open Inference Protocol, and MLflow's answers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from pipeline.errors import InputError

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
PROBABILITY = "probability"
TYPES = (
    "BOOL",
    "BYTES",
    "FP16",
    "FP32",
    "FP64",
    *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)),
)
"""Datatypes of the Open Inference Protocol."""
Scores = npt.NDArray[np.float64]


def parse_json(body: bytes) -> Any:
    """Parses JSON.

    Raises:
        InputError: If the body is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError("body", "JSON text", f"{error}"[:120], "Correct the text.") from None


def read_arrow(body: bytes) -> pa.Table:
    """Returns the table of an Arrow IPC stream.

    Raises:
        InputError: If the body is none, or its offsets and texts are not what its schema says.
    """
    try:
        with pa.ipc.open_stream(body) as stream:
            rows = stream.read_all()
        rows.validate(full=True)  # a wrong offset would be read beyond the body's end
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError("body", "an Arrow IPC stream", f"'{reason:.120}'", f"Send one with type {ARROW}.") from None
    return rows


def write_arrow(scores: Scores) -> bytes:
    """Returns probabilities as an Arrow IPC stream with one column."""
    batch = pa.record_batch([pa.array(scores)], names=[PROBABILITY])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def predictions(scores: Scores) -> list[dict[str, float]]:
    """Returns probabilities as MLflow's server does.

    Example:
        >>> predictions(np.array([0.25]))
        [{'probability': 0.25}]
    """
    return [{PROBABILITY: score} for score in scores.tolist()]


def read_tensors(request: Any, kinds: Mapping[str, str]) -> dict[str, list[Any]]:
    """Returns the columns of an inference request of the Open Inference Protocol.

    A tensor of shape [N] is a column, and one of shape [N, K] a column of lists. Null is allowed in data, and nulls at
    the end of a list make it shorter: lists of a tensor have one length. Shape [N, 1] is a column, too, if the model
    reads no lists there.

    Args:
        kinds: The columns that the model reads, with their types.
    Raises:
        InputError: If the request is none. It names the tensor.
    Example:
        >>> tags = {"name": "tags", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, None]}
        >>> read_tensors({"inputs": [tags]}, {"tags": "list<long>"})
        {'tags': [[1, 2], [3]]}
    """
    tensors = request.get("inputs") if isinstance(request, dict) else None
    if not isinstance(tensors, list) or not tensors:
        remedy = "Send {'inputs': [{'name': ..., 'shape': [N], 'datatype': ..., 'data': [...]}, ...]}."
        raise InputError("body", "an inference request with inputs", f"{request!r:.60}", remedy)
    columns: dict[str, list[Any]] = {}
    for tensor in tensors:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise InputError("inputs", "tensors with a name", f"{tensor!r:.60}", "Name each.")
        if tensor["name"] in columns:
            raise InputError(f"input '{tensor['name']}'", "one tensor of that name", "two", "Leave one out.")
        columns[tensor["name"]] = _column(tensor, kinds.get(tensor["name"], "").startswith("list"))
    return columns


def _column(tensor: Mapping[str, Any], holds_lists: bool) -> list[Any]:
    where = f"input '{tensor['name']}'"
    shape, data, kind = tensor.get("shape"), tensor.get("data"), tensor.get("datatype")
    if kind not in TYPES:
        raise InputError(where, f"a datatype among {', '.join(TYPES)}", f"{kind!r:.60}", "Correct it.")
    if (
        not isinstance(shape, list)
        or not all(type(size) is int and size >= 0 for size in shape)
        or not 0 < len(shape) < 3
    ):
        raise InputError(where, "shape [rows] or [rows, items]", f"{shape!r:.60}", "Correct it.")
    if not isinstance(data, list):
        raise InputError(where, "data as a list", f"{data!r:.60}", "Binary data are not supported; send JSON.")
    if len(shape) == 1:
        if len(data) != shape[0]:
            raise InputError(where, f"{shape[0]} values", f"{len(data)}", "Let shape and data agree.")
        return data
    rows, items = shape
    if len(data) == rows and all(isinstance(row, list) and len(row) == items for row in data):
        lists = data
    elif len(data) == rows * items and not any(isinstance(value, list) for value in data):
        lists = [data[row * items : (row + 1) * items] for row in range(rows)]
    else:
        raise InputError(where, f"{rows} x {items} values", f"{len(data)}", "Let shape and data agree.")
    if items == 1 and not holds_lists:
        return [value for [value] in lists]
    return [_without_padding(row) for row in lists]


def _without_padding(row: list[Any]) -> list[Any]:
    end = len(row)
    while end and row[end - 1] is None:
        end -= 1
    return row[:end]
