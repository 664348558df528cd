"""Makes Parquet files byte by byte: those of writers that are not at hand, such as old ones.

Structs of Thrift are dictionaries of their fields by number.
"""

import struct
from typing import Any

Struct = dict[int, Any]


class Long(int):
    """A number that Thrift calls i64. Others are i32."""


def varint(number: int) -> bytes:
    """Encodes an unsigned number."""
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def thrift(fields: Struct) -> bytes:
    """Encodes a struct in Thrift's compact protocol."""
    out, last = b"", 0
    for number, value in sorted(fields.items()):
        if value is not None:
            out += bytes([number - last << 4 | kind(value)]) + (b"" if isinstance(value, bool) else encode(value))
            last = number
    return out + b"\0"


def kind(value: Any) -> int:
    """Returns Thrift's number of a type."""
    kinds = {bool: 1 if value else 2, int: 5, Long: 6, float: 7, bytes: 8, list: 9, dict: 12}
    return kinds[type(value)]


def encode(value: Any) -> bytes:
    """Encodes a value without its type."""
    if isinstance(value, int):
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, bytes):
        return varint(len(value)) + value
    if isinstance(value, dict):
        return thrift(value)
    return bytes([len(value) << 4 | kind(value[0])]) + b"".join(map(encode, value))


def runs(*parts: tuple[int, int] | list[int], width: int = 1) -> bytes:
    """Encodes levels or indices: (count, value) is a run, a list is bit-packed."""
    out = b""
    for part in parts:
        if isinstance(part, tuple):
            out += varint(part[0] << 1) + part[1].to_bytes((width + 7) // 8, "little")
        else:
            groups = (len(part) + 7) // 8
            bits = sum(value << place * width for place, value in enumerate(part))
            out += varint(groups << 1 | 1) + bits.to_bytes(groups * width, "little")
    return out


def ids(*values: int) -> bytes:
    """Encodes ids as they are."""
    return struct.pack(f"<{len(values)}q", *values)


def data_page(
    levels: int, repetition: bytes, definition: bytes, values: bytes, encoding: int = 0, fields: Struct | None = None
) -> bytes:
    """Makes a data page of the first version.

    Args:
        fields: More of its header.
    """
    body = b"".join(struct.pack("<I", len(part)) + part for part in (repetition, definition)) + values
    header = {1: 0, 2: len(body), 3: len(body), 5: {1: levels, 2: encoding, 3: 3, 4: 3}} | (fields or {})
    return thrift(header) + body


def second_page(
    levels: int, rows: int, repetition: bytes, definition: bytes, values: bytes, stored: bytes, compressed: bool | None
) -> bytes:
    """Makes a data page of the second version, with plain values.

    Args:
        stored: The values as the page has them.
        compressed: What its header says about them.
    """
    own = {1: levels, 2: 0, 3: rows, 4: 0, 5: len(definition), 6: len(repetition), 7: compressed}
    before = repetition + definition
    header = {1: 3, 2: len(before + values), 3: len(before + stored), 8: own}
    return thrift(header) + before + stored


def dictionary_page(*values: int, encoding: int = 0) -> bytes:
    """Makes a dictionary page."""
    body = ids(*values)
    return thrift({1: 2, 2: len(body), 3: len(body), 7: {1: len(values), 2: encoding}}) + body


def index_page() -> bytes:
    """Makes a page of a type that nobody writes, but the format has."""
    return thrift({1: 1, 2: 3, 3: 3, 6: {}}) + b"abc"


NUMBER: Struct = {1: 2}
"""Physical type INT64."""
THREE_LEVELS = [
    {3: 1, 4: b"ids", 5: 1, 6: 3},
    {3: 2, 4: b"list", 5: 1},
    NUMBER | {3: 1, 4: b"element"},
]
TWO_LEVELS = [{3: 1, 4: b"ids", 5: 1, 6: 3}, NUMBER | {3: 2, 4: b"array"}]
REPEATED = [NUMBER | {3: 2, 4: b"ids"}]


def parquet(
    pages: list[bytes], levels: int, rows: int, schema: list[Struct], codec: int = 0, by: bytes = b"x"
) -> bytes:
    """Makes a file of one column.

    Args:
        levels: In all pages.
        codec: Parquet's number of it.
        by: The writer.
    """
    body = b"".join(pages)
    leaf = {
        1: 2, 2: [0, 3, 8], 3: [part[4] for part in schema], 4: codec, 5: Long(levels), 6: Long(1 << 20),
        7: Long(len(body)), 9: Long(4),
    }  # fmt: skip
    group = {1: [{2: Long(4), 3: leaf}], 2: Long(1 << 20), 3: Long(rows)}
    root: Struct = {4: b"root", 5: 1}
    footer = thrift({1: 1, 2: [root, *schema], 3: Long(rows), 4: [group], 6: by})
    return b"PAR1" + body + footer + struct.pack("<I", len(footer)) + b"PAR1"
