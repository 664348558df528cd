"""Loops over the bytes of Parquet's pages. They check bounds, as numba does not: a damaged page is an error, no crash.

Source:
    Encodings.md of apache/parquet-format: the hybrid of runs and bit-packed values ("RLE/Bit-Packing Hybrid").
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types

from storage.compiled import compiled, instruction

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Items = npt.NDArray[np.signedinteger[Any]]
Flags = npt.NDArray[np.bool_]

MALFORMED = -1
PLACE, LEFT, PACKED, AT = range(4)
"""Fields of a cursor: where the next run begins; values left of the current run; whether it is bit-packed; and the bit
at which its next value begins, or else its value."""


@instruction
def load_word(_: Any, array: Any, index: Any) -> Any:
    """Returns the eight bytes array[index : index + 8] as an unsigned integer. Callers check the bounds."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return types.uint64(array, types.int64), code


@instruction
def trailing_zeros(_: Any, word: Any) -> Any:
    """Returns the place of the lowest bit of a word that is not 0."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), code


@compiled
def read_run(body: Bytes, place: int, end: int) -> tuple[int, int]:
    """Reads the header of a run: (header, place after it). The place is -1 if it is damaged."""
    value = 0
    for shift in range(0, 35, 7):
        if place >= end:
            break
        byte = int(body[place])
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    return 0, MALFORMED


@compiled
def find_rows(body: Bytes, place: int, end: int, levels: int, starts: Ids) -> int:
    """Finds the repetition levels that begin a row, which are 0. The others are 1.

    Args:
        body: The page.
        place, end: Bytes of its repetition levels.
        levels: Their number.
        starts: Gets the position of each.
    Returns:
        Their number, or -1 if the page is damaged or has more rows than there is room for.
    """
    at = rows = 0
    while at < levels:
        header, place = read_run(body, place, end)
        count = min((header >> 1) * (8 if header & 1 else 1), levels - at)
        if place < 0 or count == 0 or place >= end:
            return MALFORMED
        if header & 1:
            if place + (header >> 1) > end:
                return MALFORMED
            for first in range(0, count, 64):
                byte = place + (first >> 3)
                if byte + 8 <= len(body):
                    word = ~load_word(body, byte)
                else:
                    word = np.uint64(0)
                    for i in range(byte, end):
                        word |= np.uint64(255 - body[i]) << np.uint64((i - byte) << 3)
                if count - first < 64:
                    word &= (np.uint64(1) << np.uint64(count - first)) - np.uint64(1)
                while word:
                    if rows == len(starts):
                        return MALFORMED
                    starts[rows] = at + first + trailing_zeros(word)
                    rows += 1
                    word &= word - np.uint64(1)
            place += header >> 1
        else:
            if body[place] > 1:
                return MALFORMED
            if body[place] == 0:
                if rows + count > len(starts):
                    return MALFORMED
                for i in range(count):
                    starts[rows + i] = at + i
                rows += count
            place += 1
        at += count
    return rows


@compiled
def place_rows(
    body: Bytes, place: int, end: int, levels: int, empty: int, most: int, starts: Ids, nulls: Flags
) -> tuple[int, int]:
    """Reads definition levels: turns positions of levels into positions of items, and marks null lists.

    Args:
        body: The page.
        place, end: Bytes of its definition levels.
        levels: Their number.
        empty: Level of an empty list. One below it is a null list.
        most: Level of an item that is not null.
        starts: int64 [N]. Position of the first level of each row, which becomes that of its first item.
        nulls: bool [N]. Gets whether the row is null.
    Returns:
        (items, items that are not null), or (-1, -1) if the page is damaged.
    """
    width = 1 if most == 1 else 2
    at = row = without = present = 0
    while at < levels:
        header, place = read_run(body, place, end)
        count = min((header >> 1) * (8 if header & 1 else 1), levels - at)
        if place < 0 or count == 0 or place >= end:
            return MALFORMED, MALFORMED
        if header & 1:
            if place + (header >> 1) * width >= end + width or place + ((count * width + 7) >> 3) > end:
                return MALFORMED, MALFORMED  # some writers cut the padding of the last group
            for i in range(count):
                level = (int(body[place + (i * width >> 3)]) >> (i * width & 7)) & (1 if width == 1 else 3)
                begins = row < len(starts) and starts[row] == at + i
                if level > most or (level <= empty and not begins):
                    return MALFORMED, MALFORMED
                if begins:
                    starts[row] -= without
                    nulls[row] = level < empty
                    row += 1
                without += level <= empty
                present += level == most
            place += (header >> 1) * width
        else:
            level = int(body[place])
            if level > most:
                return MALFORMED, MALFORMED
            if level <= empty:
                for i in range(count):
                    if row == len(starts) or starts[row] != at + i:
                        return MALFORMED, MALFORMED
                    starts[row] -= without
                    nulls[row] = level < empty
                    without += 1
                    row += 1
            else:
                while row < len(starts) and starts[row] < at + count:
                    starts[row] -= without
                    nulls[row] = False
                    row += 1
                present += count if level == most else 0
            place += 1
        at += count
    return levels - without, present


@compiled
def find_present(body: Bytes, place: int, end: int, levels: int, empty: int, most: int, present: Flags) -> None:
    """Marks the items that are not null. `place_rows` has read the same levels before and found them sound."""
    width = 1 if most == 1 else 2
    at = item = 0
    while at < levels:
        header, place = read_run(body, place, end)
        packed = header & 1
        count = min((header >> 1) * (8 if packed else 1), levels - at)
        for i in range(count):
            bit = i * width if packed else 0
            level = (int(body[place + (bit >> 3)]) >> (bit & 7)) & (1 if width == 1 else 3)
            if level > empty:
                present[item] = level == most
                item += 1
        place += (header >> 1) * width if packed else 1
        at += count


@compiled
def look_up(body: Bytes, width: int, cursor: Ids, dictionary: Items, out: Items) -> int:
    """Decodes the next values of a page that stores indices into a dictionary.

    Args:
        body: The page.
        width: Bits of an index, 0 to 32.
        cursor: int64 [4]. Where to go on.
        dictionary: int32 or int64 [D], D above 0.
        out: int32 or int64 [V].
    Returns:
        Number of values, or -1 if the page is damaged or has too few.
    """
    done, end, last = 0, len(body), np.uint64(len(dictionary) - 1)
    mask, worst = (np.uint64(1) << np.uint64(width)) - np.uint64(1), np.uint64(0)
    while done < len(out):
        if cursor[LEFT] == 0:
            header, place = read_run(body, cursor[PLACE], end)
            packed = header & 1
            size = (header >> 1) * width if packed else (width + 7) >> 3
            missing = max(place + size - end, 0)
            if place < 0 or header < 2 or missing >= max(width if packed else 1, 1):
                return MALFORMED
            cursor[PACKED] = packed
            if packed:
                cursor[LEFT] = ((size - missing) << 3) // width if missing else (header >> 1) << 3
                cursor[AT] = place << 3
            else:
                cursor[LEFT], cursor[AT] = header >> 1, 0
                for i in range(size):
                    cursor[AT] |= int(body[place + i]) << (i << 3)
            cursor[PLACE] = place + size
        count = min(cursor[LEFT], len(out) - done)
        part = out[done : done + count]
        if cursor[PACKED]:
            bit = cursor[AT]
            whole = min(max((((end - 8) << 3) - bit) // max(width, 1), 0), count)
            for i in range(whole):
                place = bit + i * width
                code = (load_word(body, place >> 3) >> np.uint64(place & 7)) & mask
                worst = max(worst, code)
                part[i] = dictionary[min(code, last)]
            for i in range(whole, count):
                code = np.uint64(0)
                for j in range(width):
                    place = bit + i * width + j
                    code |= np.uint64((body[place >> 3] >> (place & 7)) & 1) << np.uint64(j)
                worst = max(worst, code)
                part[i] = dictionary[min(code, last)]
            cursor[AT] += count * width
        else:
            worst = max(worst, np.uint64(cursor[AT]))
            value = dictionary[min(np.uint64(cursor[AT]), last)]
            for i in range(count):
                part[i] = value
        cursor[LEFT] -= count
        done += count
    return MALFORMED if worst > last else done
