"""Error rates of the gate on pairs of models of known quality, evaluated on the same rows.

    python -m benchmarks.gate --json

In a pair, each model's logits are the true ones plus its own noise, and the two differ by a standard deviation of 0.3.
Models of equal quality have equal noise. Unequal noise gives a chosen NE difference. `false_alarms` is the share of
equal pairs with an interval that excludes zero. `power_...` is the share of pairs, with a challenger better by that
much, in which the gate promotes it.

    python -m benchmarks.gate --days 5 7 14 19 20 60 --pairs 1000

asks the gate itself about pairs of equal quality over so many days. Each model has errors of its own on each day, and
each day has a label rate of its own. `called_different_...` is the share that the gate calls different.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.gate import compare, ne_difference, sum_pairs
from pipeline.evaluation.metrics import Floats, base_entropy, losses

APART = 0.3
"""Standard deviation of the difference of two models' logits."""
LEVEL = 0.05
DAY_ERROR, RATES_APART = 0.1, 0.25
"""Standard deviations in logits over days: of each model's own error, and of what moves the label rate."""


def sigmoid(logits: Floats) -> Floats:
    """Converts logits to probabilities."""
    result: Floats = 1.0 / (1.0 + np.exp(-logits))
    return result


def truth(rows: int, random: np.random.Generator) -> Floats:
    """Draws true logits. About three labels in ten are 1, and the NE of the truth is about .83."""
    return random.normal(-1.1, 1.1, rows)


def pair(rows: int, better_by: float, random: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Draws labels and both models' probabilities. The champion's NE is higher by the share `better_by`."""
    logits = truth(rows, random)
    ours, theirs = noises(better_by)
    labels = (random.random(rows) < sigmoid(logits)).astype(np.float64)
    return (
        labels, sigmoid(logits + random.normal(0.0, ours, rows)), sigmoid(logits + random.normal(0.0, theirs, rows)),
    )  # fmt: skip


@cache
def noises(better_by: float) -> tuple[float, float]:
    """Returns the standard deviations of two models' noise for an NE difference. Their squares add up to APART's.

    Computes the expected NE over many rows from true probabilities instead of labels.
    """
    random = np.random.default_rng(11)
    logits = truth(400_000, random)
    rate, noise = sigmoid(logits), random.normal(size=len(logits))

    def ne(deviation: float) -> float:
        found = sigmoid(logits + deviation * noise)
        ones = np.ones_like(found)
        loss = rate * losses(ones, found) + (1.0 - rate) * losses(0.0 * ones, found)
        return float(loss.mean()) / base_entropy(float(rate.mean()))

    low, high = 0.0, APART / math.sqrt(2.0)
    if better_by == 0.0:
        return high, high
    for _ in range(30):
        middle = (low + high) / 2.0
        other = math.sqrt(APART**2 - middle**2)
        if ne(other) / ne(middle) - 1.0 > better_by:
            low = middle
        else:
            high = middle
    return high, math.sqrt(APART**2 - high**2)


def false_alarms(pairs: int, rows: int, seed: int = 1) -> int:
    """Counts pairs of equal quality that are called different."""
    called = 0
    for number in range(pairs):
        found = ne_difference(sum_pairs(*pair(rows, 0.0, np.random.default_rng([seed, number]))), True, LEVEL)
        called += found is not None and not found.low <= 0.0 <= found.high
    return called


def promoted(pairs: int, rows: int, better_by: float, seed: int = 2) -> int:
    """Counts challengers with a lower NE that the gate promotes."""
    found = 0
    for number in range(pairs):
        difference = ne_difference(
            sum_pairs(*pair(rows, better_by, np.random.default_rng([seed, number]))), True, LEVEL
        )
        found += difference is not None and difference.high < 0.0
    return found


def judged_days(days: int, rows: int, random: np.random.Generator) -> ScoredRows:
    """Draws two models of equal quality on days with effects of their own.

    Args:
        rows: Of each day.
    """
    day = np.repeat(np.arange(days), rows)
    logits = truth(days * rows, random) + random.normal(0.0, RATES_APART, days)[day]
    labels = (random.random(len(logits)) < sigmoid(logits)).astype(np.float64)
    noise = APART / math.sqrt(2.0)
    ours, theirs = (
        sigmoid(logits + random.normal(0.0, noise, len(day)) + random.normal(0.0, DAY_ERROR, days)[day]) for _ in "ab"
    )
    return ScoredRows(labels, ours, pa.table({"day": pa.array(day, pa.int32()).cast(pa.date32())}), theirs)


def called_different(pairs: int, days: int, rows: int, seed: int = 3) -> int:
    """Counts pairs of equal quality that the gate, left to its defaults, calls different."""
    called = 0
    for number in range(pairs):
        evaluation = Evaluation(EvaluationConfig())
        evaluation.add(judged_days(days, rows, np.random.default_rng([seed, days, number])))
        found = compare(evaluation, evaluation.report(), GateConfig(level=LEVEL), 1).difference
        called += found is not None and not found.low <= 0.0 <= found.high
    return called


def main(words: Sequence[str]) -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--days", type=int, nargs="+", help="ask the gate about so many days, each of --day-rows rows")
    parser.add_argument("--day-rows", type=int, default=500)
    options = parser.parse_args(words)
    if options.days:
        for days in options.days:
            share = called_different(options.pairs, days, options.day_rows) / options.pairs
            print(f"called_different_{days}_days: {share}", flush=True)
        return
    figures = {"false_alarms": false_alarms(options.pairs, options.rows) / options.pairs}
    for percent in (0.1, 0.5):
        share = promoted(options.pairs, options.rows, percent / 100.0) / options.pairs
        figures[f"power_{percent}_percent"] = share
    figures |= {"pairs": options.pairs, "rows": options.rows, "level": LEVEL}
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
