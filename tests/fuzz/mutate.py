"""Damages valid examples. A random generator decides how."""

import json
from random import Random
from typing import Any

NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 256, -(2**31), 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400,
    0.0, -0.0, 0.5, 1e-320, 1e300, 1.7e308, -1e300, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
TEXTS = [
    "", " ", "\0", "a\0b", "'", '"', "\n", "\r\n", "../../etc/passwd", "/", ".", "%s%n{}", "${HOME}", "${", "NaN", "null", "None",
    "1e999", "-1", "0x10", "2024-02-30", "9999-12-31", "0001-01-01", "\ud800", "\U0001f600", "\u202e", "é" * 300, "x" * 70_000,
]  # fmt: skip
LONGEST = 1 << 20
"""Bytes of the longest mutant, roughly."""
DEEP = 100_000


def odd_value(random: Random) -> Any:
    """Draws a JSON value that hardly any reader expects."""
    kind = random.randrange(8)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind < 4:
        return random.choice(TEXTS)
    return random.choice(
        [
            None,
            True,
            False,
            [],
            {},
            [None],
            [[]],
            {"": None},
            [0] * random.choice([3, 5_000]),
            {str(i): i for i in range(300)},
        ]
    )


def mutate_value(random: Random, value: Any, times: int | None = None) -> Any:
    """Returns a copy of a JSON value with some of its parts replaced, removed, renamed, doubled or exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(times or random.choice([1, 1, 1, 2, 3, 8])):
        value = _change(random, value)
        if len(json.dumps(value)) > LONGEST:
            break
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value[:50])
        for key, item in pairs:
            found += _places(item, (*path, key))
    return found


def _change(random: Random, value: Any) -> Any:
    places = _places(value)
    path = random.choice(places)
    if not path:
        return odd_value(random) if random.random() < 0.2 or len(places) == 1 else value
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    key, kind = path[-1], random.randrange(9)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, dict):
        inner[random.choice([*TEXTS[:12], f"{key}s", str(key).upper()])] = inner.pop(key)
    elif kind == 2 and isinstance(inner, list):
        text = json.dumps(inner[-1:])
        most = max(LONGEST // len(text), 1)  # copies of copies would take all memory
        inner += [one for _ in range(min(random.choice([1, 2, 1_000]), most)) for one in json.loads(text)]
    elif kind == 3:
        inner[key] = [inner[key]] if random.random() < 0.5 else {"x": inner[key]}
    elif kind == 4:
        inner[key] = _other_kind(inner[key])
    elif kind == 5:
        other = value
        for part in random.choice(places):
            other = other[part]
        inner[key] = json.loads(json.dumps(other))
    elif kind == 6 and isinstance(inner[key], int | float) and not isinstance(inner[key], bool):
        inner[key] = inner[key] * random.choice([-1, 2, 1000]) + random.choice([-1, 0, 1])
    else:
        inner[key] = odd_value(random)
    return value


def _other_kind(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode("latin-1") if not value.isdecimal() else int(value[:300])
    return str(value) if not isinstance(value, dict | list) else json.dumps(value)


def mutate_json(random: Random, value: Any) -> bytes:
    """Returns JSON text of a damaged value, or damaged text of the value."""
    if random.random() < 0.7:
        text = json.dumps(mutate_value(random, value), ensure_ascii=random.random() < 0.5)
        return text.encode(errors="surrogatepass")
    kind = random.randrange(6)
    if kind == 0:
        opening, closing = random.choice([("[", "]"), ('{"a":', "}"), ("[", "")])
        return (opening * DEEP + "1" + closing * DEEP).encode()
    return mutate_bytes(random, json.dumps(value, indent=random.choice([None, 2])).encode())


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """Returns damaged bytes: flipped, cut, doubled, filled, exchanged or encoded in another way."""
    found = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 4, 16])):
        _damage(random, found)
    if random.random() < 0.04:
        return bytes(found).decode("latin-1").encode(random.choice(["utf-16", "utf-8-sig", "utf-32", "utf-7"]))
    return bytes(found[: 4 * LONGEST])


def _damage(random: Random, found: bytearray) -> None:
    size = len(found)
    at = random.randrange(size + 1)
    span = min(random.choice([1, 2, 4, 8, 64, 1_024]), size - at)
    kind = random.randrange(11)
    if kind <= 1 and at < size:
        found[at] ^= 1 << random.randrange(8)
    elif kind == 2 and at < size:
        found[at] = random.choice([0, 1, 127, 128, 255, 10, 13, 34, 39, 44, random.randrange(256)])
    elif kind == 3:
        del found[at : at + span]
    elif kind == 4:
        del found[at:]
    elif kind == 5:
        found[at:at] = found[at : at + span] * random.choice([1, 2, 100])
    elif kind == 6:
        found[at:at] = random.choice(
            [b"\0" * 9, b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b'"', b"'", b",", b"\t", b"9" * 400, b"-", b"1e999", b"\xed\xa0\x80",
             str(random.choice(NUMBERS)).encode(), random.choice(TEXTS).encode(errors="surrogatepass")]
        )  # fmt: skip
    elif kind == 7:
        found[at : at + span] = bytes(span)
    elif kind == 8 and size:
        other = random.randrange(size)
        found[at : at + span] = found[other : other + span]
    elif kind == 9:
        found[at : at + span] = random.randbytes(span)
    elif size and size < LONGEST:
        found[at:at] = found[at : at + 64] * min(random.choice([10, 1_000]), LONGEST // 64)
