"""Tells whether text is decimal numbers as programs print them, in half the time that SQL takes."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DECIMAL = r"-?((0|[1-9]\d{0,14})|(0|[1-9]\d*)?\.\d+([eE][+-]?\d+)?|(0|[1-9]\d*)[eE][+-]\d+)"
"""Decimal numbers as programs write them. A whole one has at most 15 digits: more would be rounded."""
EXACT_LENGTH = 15
"""Characters up to which a double keeps all digits. A longer text has to be the one that the double is printed as."""
ZERO_BEHIND = r"\.\d+0$"
"""Ends of numbers with a zero behind others, such as 1.10."""
_PLAIN = (1e-4, 1e15)
"""Sizes that everybody prints without an exponent."""
_FEW = 100
_AT_ONCE = 8_192
"""Texts whose characters stay in the processor's cache."""


def find_decimal(columns: Mapping[str, Sequence[Path]], threads: int) -> set[str]:
    """Returns the columns with a value whose values are all decimal numbers that a double keeps, without zeros behind.

    SQL takes twice as long, because it makes a text of each number.

    Args:
        columns: Column of text -> the Parquet files that have it.
    """
    left, seen = {*columns}, set[str]()

    def look(path: Path, group: int) -> None:
        with pq.ParquetFile(path) as file:
            for name in names[path]:
                if name in left:
                    texts = file.read_row_group(group, [name], use_threads=False)[name].drop_null()
                    seen.update([name] if len(texts) else [])
                    if not all(map(_are_decimal, texts.chunks)):
                        left.discard(name)

    names: dict[Path, list[str]] = {}
    for name, paths in columns.items():
        for path in paths:
            names.setdefault(path, []).append(name)
    parts = [(path, group) for path in names for group in range(pq.read_metadata(path).num_row_groups)]
    with ThreadPoolExecutor(threads, "numbers") as pool:
        for _ in pool.map(look, *zip(*parts, strict=True)):
            pass
    return left & seen


def _are_decimal(texts: pa.StringArray) -> bool:
    """Tells whether all texts are decimal numbers that a double keeps, without zeros behind."""
    try:
        texts[:_FEW].cast(pa.float64())  # Arrow takes long to refuse many
        values = texts.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    size = np.abs(values.to_numpy())
    plain = ((size >= _PLAIN[0]) & (size < _PLAIN[1])) | (size == 0)
    if not plain.all():
        odd = ~plain
        if not all(map(_is_decimal, texts.filter(odd).to_pylist(), values.filter(odd).to_pylist())):
            return False
        texts, values = texts.filter(plain), values.filter(plain)
    if _are_printed(texts, values):
        return True
    zeros = texts.filter(pc.ends_with(texts, "0"))
    if pc.any(pc.match_substring_regex(zeros, ZERO_BEHIND)).as_py():
        return False
    length = pc.binary_length(texts)
    short = pc.match_substring_regex(texts.filter(pc.less_equal(length, EXACT_LENGTH)), f"^{DECIMAL}$")
    long = pc.greater(length, EXACT_LENGTH)
    return pc.all(short, min_count=0).as_py() and _are_printed(texts.filter(long), values.filter(long))


def _is_decimal(text: str, value: float) -> bool:
    if len(text) > EXACT_LENGTH:
        return repr(value) == text
    return re.fullmatch(DECIMAL, text, re.ASCII) is not None and re.search(ZERO_BEHIND, text) is None


def _are_printed(texts: pa.StringArray, values: pa.DoubleArray) -> bool:
    """Tells whether each text has the fewest digits that give its value, printed without an exponent."""
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(some)], some), ",")[0].as_buffer().to_pybytes()
        numbers = values[start : start + _AT_ONCE].to_numpy()
        if orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] != joined:
            return False
    return True
