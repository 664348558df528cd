"""Model quality of the example configs: trains them and holds NE and AUC against configs/quality.json.

    python -m benchmarks.quality
    python -m benchmarks.quality configs/flights.yaml --seeds 1 --json

Each config is trained once for each seed in a home of its own. The mean over the seeds may be worse than the file's
value by the file's tolerance. A config without its data is named and not run. Exits with 1 if a config is too bad.
`--record` writes the measured means and rows into the file and keeps the tolerances.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt, TypeAdapter

from benchmarks.machine import ROOT, describe_machine, machine, say
from pipeline.config import load
from pipeline.data.formats.files import find_files
from pipeline.errors import ConfigError

FILE = ROOT / "configs" / "quality.json"
HIGHER_IS_BETTER = {"ne": False, "auc": True}
Verdict = Literal["ok", "better", "worse", "not run"]


class Expected(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One metric of a config."""

    value: float
    """Mean over the seeds."""
    tolerance: PositiveFloat
    """How much worse the mean may be."""

    def judge(self, name: str, found: float) -> Verdict:
        """Compares a mean with this one.

        Example:
            >>> Expected(value=0.85, tolerance=0.01).judge("ne", 0.87)
            'worse'
        """
        gain = (found - self.value) * (1 if HIGHER_IS_BETTER[name] else -1)
        if math.isnan(gain) or gain < -self.tolerance:
            return "worse"
        return "better" if gain > self.tolerance else "ok"


class Published(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A result that others have published for the same rows."""

    model: str
    metrics: Mapping[str, float]
    source: str


class Target(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a config is expected to reach on its test rows."""

    seeds: tuple[PositiveInt, ...] = ()
    """Those of the figures. Empty: it has not been run."""
    test_rows: PositiveInt | None = None
    """None: releases of the data differ in it."""
    metrics: Mapping[str, Expected] = {}
    """`ne`, `auc`."""
    published: tuple[Published, ...] | Literal["none known", ""] = ""
    """Results of others. Empty: the rows are those of another config, or of our own split or generator."""
    not_run: str | None = None
    """Why there are no figures."""
    trains: bool = True
    """Whether `make quality` trains it where its data is. False: it is a study, or has a command of its own."""


Targets = TypeAdapter(dict[str, Target])


class Finding(BaseModel, frozen=True):
    """What came of one config."""

    config: str
    verdict: Verdict
    metrics: Mapping[str, tuple[float, ...]] = {}
    """Metric -> its value for each seed."""
    rows: int | None = None
    seconds: float = 0.0
    why: str = ""


def read_targets(path: Path = FILE) -> dict[str, Target]:
    """Reads the file. Raises a `ValidationError` if it holds anything else."""
    return Targets.validate_json(path.read_bytes())


def missing_data(config: str) -> str | None:
    """Says which files of a config's source are not there. None: all are."""
    source = load(ROOT / config).source
    places = [("source.path", source.path), *(("source.lookups", table.path) for table in source.lookups)]
    try:
        for where, pattern in places:
            if pattern is not None:
                find_files(pattern, ROOT, where)
    except ConfigError as error:
        return str(error)
    return None


def judge(config: str, target: Target, results: Sequence[Mapping[str, Any]], seconds: float = 0.0) -> Finding:
    """Holds the results of a config's seeds, as the commands print them, against its target."""
    metrics = {name: tuple(float(one["eval"][name]) for one in results) for name in ("ne", "auc")}
    [rows] = {int(one["eval"]["rows"]) for one in results}
    found: dict[str, Verdict] = {
        name: expected.judge(name, sum(metrics[name]) / len(results)) for name, expected in target.metrics.items()
    }
    if target.test_rows not in (None, rows):
        return Finding(
            config=config, verdict="worse", metrics=metrics, rows=rows, seconds=seconds,
            why=f"{rows:,} test rows instead of {target.test_rows:,}",
        )  # fmt: skip
    verdict: Verdict = next((one for one in ("worse", "better") if one in found.values()), "ok")  # type: ignore[misc]
    why = ", ".join(f"{name} {one}" for name, one in found.items() if one == verdict != "ok")
    return Finding(config=config, verdict=verdict, metrics=metrics, rows=rows, seconds=seconds, why=why)


def train(config: str, seed: int, home: str) -> dict[str, Any]:
    """Ingests and trains a config by its command. Returns the command's result.

    Raises:
        RuntimeError: If the command fails. Quotes its error.
    """
    words = [config, f"seed={seed}", f"home={home}", "evaluation.importance_rows=null"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DLRM_HOME", "MLFLOW_TRACKING_URI")
    }
    done = subprocess.run(
        [sys.executable, "-m", "flows.end_to_end", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-500:]}
    if done.returncode:
        raise RuntimeError(f"{config}, seed {seed}: {result.get('error')}")
    return result


def measure(config: str, target: Target, seeds: Sequence[int]) -> Finding:
    """Trains a config with each seed, if its data is there."""
    missing = missing_data(config) if target.trains else target.not_run
    if missing is not None:
        return Finding(config=config, verdict="not run", why=missing)
    began = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory() as home:
        for seed in seeds:
            results.append(train(config, seed, home))
            say(f"{config}, seed {seed}: NE {results[-1]['eval']['ne']:.4f}, {time.perf_counter() - began:.0f} s")
    return judge(config, target, results, time.perf_counter() - began)


def record(
    targets: Mapping[str, Target], findings: Sequence[Finding], seeds: Sequence[int] | None
) -> dict[str, Target]:
    """Returns the targets with the measured means and rows. Configs that were not run keep theirs."""
    made = dict(targets)
    for finding in (one for one in findings if one.verdict != "not run"):
        target = targets[finding.config]
        metrics = {
            name: Expected(
                value=round(sum(values) / len(values), 4),
                tolerance=target.metrics[name].tolerance if name in target.metrics else 0.005,
            )
            for name, values in finding.metrics.items()
        }
        changed = {"metrics": metrics, "seeds": tuple(seeds or target.seeds or (1,)), "not_run": None}
        changed |= {"test_rows": finding.rows} if target.test_rows or not target.metrics else {}
        made[finding.config] = target.model_copy(update=changed)
    return made


def describe(finding: Finding, target: Target) -> str:
    """Formats one config as a line."""
    if finding.verdict == "not run":
        return f"{finding.config:<34} not run   {finding.why}"
    cells = []
    for name, values in finding.metrics.items():
        expected = f" (expected {target.metrics[name].value:.4f})" if name in target.metrics else ""
        spread = f" +-{(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
        cells.append(f"{name} {sum(values) / len(values):.4f}{spread}{expected}")
    more = f"  {finding.why}" if finding.why else ""
    return f"{finding.config:<34} {finding.verdict:<9} {', '.join(cells)}, {finding.seconds:.0f} s{more}"


def main() -> int:
    """Runs the configs and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="configs of the file; all, if none is given")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the file")
    parser.add_argument("--record", action="store_true", help="write what was measured into the file")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    targets = read_targets()
    unknown = [config for config in arguments.configs if config not in targets]
    if unknown:
        parser.error(f"expected configs of {FILE.relative_to(ROOT)}, got {', '.join(unknown)}")
    findings = []
    for config in arguments.configs or targets:
        findings.append(measure(config, targets[config], arguments.seeds or targets[config].seeds or (1,)))
        print(describe(findings[-1], targets[config]), flush=True)
    if arguments.record:
        FILE.write_text(to_text(record(targets, findings, arguments.seeds)), encoding="utf-8")
    facts = machine(("torch", "torchrec"))
    say(describe_machine(facts))
    if arguments.json:
        print(json.dumps({**facts, "configs": [one.model_dump() for one in findings]}))
    return 1 if any(one.verdict == "worse" for one in findings) else 0


def to_text(targets: Mapping[str, Target]) -> str:
    """Formats the file: a line for each key of a target."""
    blocks = []
    for config, target in Targets.dump_python(dict(targets), mode="json", exclude_defaults=True).items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in target.items()]
        blocks.append(f"  {json.dumps(config)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
