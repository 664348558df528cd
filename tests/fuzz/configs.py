"""Damaged configs: YAML files with `base` and overrides, and the words of a command line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import yaml

from flows.runtime.cli import parse
from pipeline.config import RunConfig, load
from pipeline.config.files import ROOT
from pipeline.study.estimate.footprint import load_machine
from tests.fuzz.harness import Case
from tests.fuzz.mutate import DEEP, mutate_bytes, mutate_value, odd_value

EXAMPLES = ("demo", "smoke", "flights", "movielens100k", "flights_daily")


def _bomb(random: Random) -> str:
    """Few lines that stand for billions of values."""
    levels, width = random.choice([(30, 2), (9, 9), (40, 3)])
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"name: *a{levels - 1}"])


@contextmanager
def yaml_file(folder: Path) -> Iterator[Case]:
    """Config files."""
    texts = [
        (ROOT / "configs" / f"{name}.yaml").read_bytes()
        for name in EXAMPLES
        if (ROOT / "configs" / f"{name}.yaml").exists()
    ]
    for name in EXAMPLES:
        if (ROOT / "configs" / f"{name}.yaml").exists():
            (folder / f"{name}.yaml").write_bytes((ROOT / "configs" / f"{name}.yaml").read_bytes())
    whole = [load(f"configs/{name}.yaml").model_dump(mode="json") for name in ("demo", "flights")]

    def case(random: Random) -> None:
        kind = random.randrange(20)
        if kind == 0:
            text = random.choice(["[" * DEEP, "a: " * DEEP, "- " * 5_000, '{"a":' * DEEP, "{" * 3_000 + "}" * 3_000, "&a [*a]", "a: &a {b: *a}", "!!python/object/apply:os.system [x]",
                                  "<<: *x", "a: &a {<<: *a}", "? [1, 2]\n: 3", "1: 2", "null: 3", "? {a: b}\n: c", "--- 1\n--- 2", "name: !!binary x", "name: !!timestamp 99", "base: .", "base: /dev/zero", _bomb(random)]).encode()  # fmt: skip
        elif kind < 9:
            text = yaml.safe_dump(mutate_value(random, random.choice(whole))).encode(errors="surrogatepass")
        else:
            text = mutate_bytes(random, random.choice(texts))
        (folder / "mutant.yaml").write_bytes(text)
        config = load(folder / "mutant.yaml")
        _use(config)

    yield case


def _use(config: RunConfig) -> None:
    """What every flow does with a config."""
    config.semantics()
    config.flat()
    config.shareable()
    load(config.model_dump(mode="json"))


@contextmanager
def overrides(folder: Path) -> Iterator[Case]:
    """Words of a command line."""
    os.environ.pop("DLRM_HOME", None)
    base = load("configs/demo.yaml").model_dump(mode="json")

    def keys(value: Any, path: str = "") -> list[str]:
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(key for name, item in pairs for key in keys(item, f"{path}.{name}".lstrip(".")))]

    known = [key for key in keys(base) if key]

    def case(random: Random) -> None:
        words = []
        for _ in range(random.choice([1, 1, 2, 4])):
            key = random.choice(known)
            if random.random() < 0.4:
                key = mutate_bytes(random, key.encode())[:200].decode(errors="replace")
            value = odd_value(random)
            text = value if isinstance(value, str) else yaml.safe_dump(value)
            if random.random() < 0.3:
                text = mutate_bytes(random, b"[1, {a: b, c: 'd'}]")[:5_000].decode(errors="replace")
            words.append(f"{key}={text}")
        found, _ = parse(words, ["force"])
        _use(load("configs/demo.yaml", found))

    yield case


@contextmanager
def machine(folder: Path) -> Iterator[Case]:
    """Descriptions of machines."""
    text = (ROOT / "configs" / "machines" / "epyc_9654.yaml").read_bytes()
    values = yaml.safe_load(text)

    def case(random: Random) -> None:
        damaged = random.random() < 0.5
        text_of = yaml.safe_dump(mutate_value(random, values)).encode(errors="surrogatepass")
        (folder / "machine.yaml").write_bytes(mutate_bytes(random, text) if damaged else text_of)
        load_machine(str(folder / "machine.yaml"))

    yield case
