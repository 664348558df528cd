"""Bodies of requests and answers: Arrow streams, the Open Inference Protocol, and MLflow's answers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import InputError
from storage.arrow import is_list, is_text

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
UNPACKED_BYTES = 32 << 20
"""Default of the most bytes of an Arrow body's rows."""
MOST_EMPTY_ROWS = 1 << 20
"""Rows of tensors without items, which take no bytes of the body."""
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


def read_arrow(body: bytes, limit: int = UNPACKED_BYTES) -> pa.Table:
    """Returns the table of an Arrow IPC stream. Columns of dictionaries are unpacked.

    Args:
        limit: Most bytes of the rows.
    Raises:
        InputError: If the body is none, its offsets and texts are not what its schema says, its buffers are compressed,
            or its rows are larger than the limit: a few bytes can stand for many rows.
    """
    try:
        _refuse_compressed(body)
        with pa.ipc.open_stream(body) as stream:
            rows = stream.read_all()
        rows.validate(full=True)  # a wrong offset would be read beyond the body's end
        rows = _unpack(rows, limit)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError("body", "an Arrow IPC stream", f"'{reason:.120}'", f"Send one with type {ARROW}.") from None
    return rows


def _refuse_compressed(body: bytes) -> None:
    """Looks at the head of each message. Arrow has no bound for what it would make of the buffers."""
    messages = pa.ipc.MessageReader.open_stream(body)
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type in ("record batch", "dictionary") and _is_compressed(message):
            raise InputError("body", "an uncompressed Arrow stream", "compressed buffers", "Send it uncompressed.")


def _is_compressed(message: Any) -> bool:
    """Whether a message with rows has the field `compression`. Arrow has verified that its Flatbuffer is sound."""
    head = memoryview(message.metadata)

    def follow(place: int) -> int:
        return place + int.from_bytes(head[place : place + 4], "little")

    def find(table: int, field: int) -> int:
        """Returns the place of a field, or 0 if the table lacks it."""
        fields = table - int.from_bytes(head[table : table + 4], "little", signed=True)
        size = int.from_bytes(head[fields : fields + 2], "little")
        slot = 4 + 2 * field
        offset = int.from_bytes(head[fields + slot : fields + slot + 2], "little") if slot < size else 0
        return table + offset if offset else 0

    batch = follow(find(follow(0), 2))
    if message.type == "dictionary":
        batch = follow(find(batch, 1))
    return find(batch, 3) > 0


def _unpack(rows: pa.Table, limit: int) -> pa.Table:
    """Replaces dictionaries by their values.

    Raises:
        InputError: If the rows have more bytes than the limit, or a column has a type that packs values otherwise.
    """
    left = limit
    for place, field in enumerate(rows.schema):
        column = rows.column(place)
        for chunk in column.chunks:
            left -= _count_bytes(field.name, chunk)
            if left < 0:
                raise InputError("body", f"at most {limit:,} bytes of rows", "more", "Send fewer rows.")
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(place, field.name, column.cast(field.type.value_type))
    return rows


def _count_bytes(name: str, array: pa.Array) -> int:
    """Returns the bytes of an array's values, each by itself: at least one, and a number's if it is null.

    Raises:
        InputError: If many values may be the same few bytes, as in views and runs.
    """
    kind, count = array.type, len(array)
    if pa.types.is_null(kind):
        return 8 * count
    if _has_width(kind) or is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return max(count, int(array.nbytes))
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return count + _count_bytes(name, array.flatten())
    if pa.types.is_map(kind):
        return count + _count_bytes(name, array.keys) + _count_bytes(name, array.items)
    if pa.types.is_struct(kind):
        return count + sum(_count_bytes(name, part) for part in array.flatten())
    if pa.types.is_dictionary(kind) and _has_width(kind.value_type):
        return count * max(int(kind.value_type.bit_width) // 8, 1)
    if pa.types.is_dictionary(kind) and is_text(kind.value_type):
        sizes = pc.binary_length(array.dictionary).cast(pa.int64())
        return count + (pc.sum(sizes.take(array.indices)).as_py() or 0)
    raise InputError(f"column '{name}'", "numbers, texts, times or lists of them", f"{kind}", "Send it as one of them.")


def _has_width(kind: pa.DataType) -> bool:
    try:
        return not pa.types.is_dictionary(kind) and bool(kind.bit_width)
    except ValueError:  # it has none
        return False


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


def check_outputs(request: Mapping[str, Any]) -> None:
    """Refuses requests of the Open Inference Protocol for another output than the probability.

    Raises:
        InputError: If one is asked for.
    """
    outputs = request.get("outputs")
    if outputs is not None and not isinstance(outputs, list):
        raise InputError("outputs", "a list", f"{outputs!r:.60}", "Correct it, or leave it out.")
    for output in outputs or []:
        if not isinstance(output, dict) or output.get("name") != PROBABILITY:
            remedy = "Ask for that one, or leave outputs out."
            raise InputError("outputs", f"an output named {PROBABILITY}", f"{output!r:.60}", remedy)


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
    if items == 0 and rows > MOST_EMPTY_ROWS:
        raise InputError(where, f"at most {MOST_EMPTY_ROWS:,} rows without items", f"{rows:,}", "Leave the input out.")
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
