"""Lines of JSON that are as the first ones: the copy of a file is the same, however many of its lines DuckDB looks at."""

import json
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from pipeline.data.formats import json as formats
from pipeline.data.formats.alike import are_alike
from pipeline.errors import DataError

FIRST = 4
KINDS = {
    "whole": lambda random: random.choice([0, -3, 7, 10**6, 10**17]),
    "part": lambda random: random.choice([0.5, -1.25, 3, 1e-7, 123456.75]),
    "truth": lambda random: random.random() < 0.5,
    "text": lambda random: random.choice(["", "a", 'a"b', "a\\", "\n", "é", "5", "2024-01-31", "null", "{}"]),
    "time": lambda random: f"2024-01-{random.randint(1, 31):02}",
    "ids": lambda random: [random.randint(-5, 10**6) for _ in range(random.randint(1, 3))],
    "parts": lambda random: [random.random() for _ in range(random.randint(1, 3))],
    "words": lambda random: [random.choice(["x", 'y"', "z z"]) for _ in range(random.randint(1, 3))],
}
OTHERS = [
    "5", 5, 5.5, 10**15, 10**18, 2**63, 10**25, 1e300, 123456789012345678, True, [], [None], [1.5], ["a"], [[1]], {}, {"a": 1}, "x",
]  # fmt: skip


def written(random: Random) -> list[str]:
    """Lines of objects, one of which may differ from the others in a value or a key."""
    names = random.sample(sorted(KINDS), random.randint(1, len(KINDS)))
    spaces = random.choice([(",", ":"), (", ", ": "), (" ,", " :")])
    lines = []
    for _ in range(12):
        row: dict[str, Any] = {name: KINDS[name](random) for name in names}
        row = {name: value if random.random() < 0.9 else None for name, value in row.items()}
        lines.append({name: value for name, value in row.items() if random.random() < 0.95})
    odd = lines[random.randrange(FIRST, 12)]
    if random.random() < 0.6:
        odd[random.choice([*names, "new", "Text"])] = random.choice(OTHERS)
    text = [json.dumps(row, separators=spaces, ensure_ascii=random.random() < 0.5) for row in lines]
    place = random.randrange(FIRST, 12)
    if random.random() < 0.2:
        broken = ["", "  ", "null", "[1]", "5", text[place] + " ", "{} {}", text[place][:-1], '{"text": -0}', "{,}"]
        text[place] = random.choice(broken)
    return text


def copied(plain: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> Any:
    """Types and values of a copy, or why there is none."""
    monkeypatch.setattr(formats, "SMALL_BYTES", small)
    monkeypatch.setattr(formats, "FIRST_ROWS", FIRST)
    copy = plain.with_suffix(".parquet")
    copy.unlink(missing_ok=True)
    with duckdb.connect() as connection:
        try:
            formats.copy_json(connection, plain, "file", copy, f"{plain}")
        except DataError as error:
            return f"{error}"
        except duckdb.Error:
            return "DuckDB's error"
    table = pq.read_table(copy)
    return table.schema.remove_metadata(), table.to_pylist()


@pytest.mark.parametrize("seed", range(12))
def test_copies_do_not_depend_on_the_lines_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random, found = Random(seed), set[bool]()
    monkeypatch.setattr(formats, "are_alike", lambda *given: found.add(alike := are_alike(*given)) or alike)
    for number in range(25):
        plain = tmp_path / f"{number}.json"
        plain.write_bytes(random.choice([b"\n", b"\r\n"]).join(line.encode() for line in written(random)) + b"\n")
        assert copied(plain, monkeypatch, 0) == copied(plain, monkeypatch, 1 << 30), plain.read_text()
    assert found == {True, False}


@pytest.mark.parametrize(
    ("line", "alike"),
    [
        ('{"a":1,"b":"x"}', True), ('{"b":"x"}', True), ("{}", True), ("", True), ('{ "a" : null , "b" : "\\\\" }\t', True),
        ('{"b":"x","a":1}', False), ('{"a":1,"a":2}', False), ('{"a":1.0}', False), ('{"a":"1"}', False), ('{"a":true}', False),
        ('{"b":1}', False), ('{"b":"', False), ('{"b":"\\', False), ('{"a"', False), ("{", False), ('{"a":', False),
        ('{"a":1', False), ('{"a":nul', False), ('{"c":1}', False), ('{"a":1}{"a":1}', False), ('{"a":1,}', False),
        ('{"a":1234567890123456789}', False), ('{"a":[1]}', False), ('{"a":-}', False), ("\x00", False),
    ],
)  # fmt: skip
def test_a_line_is_alike(tmp_path: Path, line: str, alike: bool) -> None:
    for text in (f"{line}\n", line, f'{{"a":7}}\n{line}\n{{"b":"y"}}\n'):
        (tmp_path / "a.json").write_text(text)
        assert are_alike(tmp_path / "a.json", {"a": "BIGINT", "b": "VARCHAR"}) is alike, text


def test_other_types_and_names_are_never_certain(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a":1}\n')
    assert not are_alike(tmp_path / "a.json", {"a": "BIGINT", "b": "HUGEINT"})
    assert not are_alike(tmp_path / "a.json", {"a": "BIGINT", 'b"': "VARCHAR"})
