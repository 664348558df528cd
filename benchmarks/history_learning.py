"""What histories of a user's last events do for NE.

    python -m benchmarks.history_learning [generated] [ratings] [--seeds 1 2 3] [--data data] [--json]

`generated`: a click depends on the shown item and on the item of the user's 200th-last event, so that the NE floor is
known for what each model reads. The mean of a list's vectors does not tell which of its events is the oldest. Models
with `oldest` have that event as a feature of its own: the difference of two histories, one of which is shorter by one.

`ratings`: MovieLens-100K split by time. Four stars or more are predicted from the user's earlier ratings, a list of
items whose weights are their stars less 3.5. It is left out if its data is not below --data or DLRM_DATA.

All models of a part have the same rows, and differ in nothing else. NE is of the test rows: the mean over the seeds,
and half of the range.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from benchmarks.machine import describe_machine, machine, say
from benchmarks.quality import missing_data
from flows.runtime.environment import quiet_libraries, set_environment
from pipeline.config import load
from pipeline.config.run import read_values
from pipeline.jobs.ingest.ingest import ingest_days
from pipeline.jobs.training.run import train_version
from pipeline.jobs.workspace import Workspace

LENGTHS = (20, 200)
NTH = 200
"""The event that decides, counted from the newest."""
ITEMS = 2 * NTH
"""Each user has one event of each item, half of them before the first sample."""
DAYS, DAY_SECONDS = 10, 86_400
START = np.datetime64("2025-03-01", "s")
SHOWN, REMEMBERED = 1.0, 2.0
"""Standard deviations of the two parts of the logit: of the shown item, and of the item of the event that decides."""
MOVIELENS = "configs/movielens100k.yaml"
TEST_SHARE, VALID_SHARE = 0.1, 0.1
"""Of the ratings, the newest first. Days are not divided."""
PACKAGES = ("torch", "torchrec", "pyarrow", "numpy")
Keys = Mapping[str, Any]
Numbers = npt.NDArray[Any]


class Learned(BaseModel, frozen=True):
    """How good a model is on the test rows."""

    part: str
    model: str
    rows: int
    ne: tuple[float, ...]
    """For each seed."""
    auc: tuple[float, ...]
    ne_floor: float | None
    """NE of the probabilities of who knows all but the order in lists. None: unknown."""


def generate(folder: Path, rows: int, users: int) -> dict[str, Keys]:
    """Writes samples and a log of events. Returns the name of each model -> its config.

    The samples have the true probability of a click if the event that decides is known; if only the newest NTH events
    are, without their order; and if no event is. The last two are means over the items that it may be.
    """
    random = np.random.default_rng(1)
    seconds = np.sort(random.integers(0, DAYS * DAY_SECONDS, (2, users, NTH)))
    times = np.concatenate([seconds[0] - DAYS * DAY_SECONDS, seconds[1]], axis=1)
    items = random.permuted(np.tile(np.arange(ITEMS), (users, 1)), axis=1)
    at, user = np.sort(random.integers(0, DAYS * DAY_SECONDS, rows)), random.integers(0, users, rows)
    shown = random.integers(0, ITEMS, rows)
    of_shown, of_event = SHOWN * random.normal(size=ITEMS), REMEMBERED * random.normal(size=ITEMS)
    happened = [int(np.searchsorted(times[one], moment)) for one, moment in zip(user, at, strict=True)]
    newest = np.stack([items[one, end - NTH : end] for one, end in zip(user, happened, strict=True)])
    truth = sigmoid(of_shown[shown] + of_event[newest[:, 0]])
    samples = {
        "at": moments(at),
        "user": user,
        "item": shown,
        "label": (random.random(rows) < truth).astype(np.int64),
        "by_event": truth,
        "by_list": sigmoid(of_shown[shown][:, None] + of_event[newest]).mean(axis=1),
        "by_nothing": sigmoid(of_shown[:, None] + of_event).mean(axis=1)[shown],
    }
    order = np.argsort(times, axis=None, kind="stable")
    log = {"time": moments(times.flat[order]), "user": order // ITEMS, "item": items.flat[order]}
    pq.write_table(pa.table(samples), folder / "samples.parquet")
    pq.write_table(pa.table(log), folder / "log.parquet")
    models = {"no history": clicks(folder, 0, False, "by_nothing")}
    for length in LENGTHS:
        knows = "by_list" if length >= NTH else "by_nothing"
        models[f"last {length}"] = clicks(folder, length, False, knows)
        models[f"last {length}, oldest"] = clicks(folder, length, True, "by_event" if length == NTH else knows)
    return models


def clicks(folder: Path, length: int, oldest: bool, knows: str) -> Keys:
    """Returns the config of a model of the generated clicks.

    Args:
        length: Events of the list. 0: there is none.
        oldest: Whether the oldest of them is a feature, too.
        knows: Column with the best probability that the model's features allow.
    """
    ids = [{"kind": "clamp", "low": 0, "high": ITEMS - 1}]  # hashed items would share rows of the table
    log = {"path": f"{folder}/log.parquet", "on": "user", "time": "time", "as_of": "at", "columns": "item"}
    histories = [log | {"last": length, "prefix": "seen_"}] if length else []
    derived = []
    columns = ["item", *(["seen_item"] if length else []), *(["oldest_item"] if oldest else [])]
    if oldest:
        histories.append(log | {"last": length - 1, "prefix": "newer_"})
        lists = {"inputs": ["seen_item", "newer_item"], "output": "oldest_item"}
        derived.append({"kind": "id_list_transform", "mode": "difference"} | lists)
    sparse = [{"columns": columns, "pooling": "mean", "transforms": ids}]
    return {
        "name": "clicks",
        "source": {"path": f"{folder}/samples.parquet", "day_column": "at"},
        "features": {"histories": histories, "derived": derived, "sparse": sparse},
        "split": {
            "days": {
                "train": ["2025-03-01..2025-03-07"],
                "valid": ["2025-03-08"],
                "test": ["2025-03-09..2025-03-10"],
            }
        },
        "model": {"embedding_width": 8, "top_mlp": [32], "interaction": "cat"},
        "training": {"batch_rows": 1_024, "epochs": 4},
        "evaluation": {"true_probability": knows},
    }


def sigmoid(logits: Numbers) -> Numbers:
    """Returns probabilities."""
    made: Numbers = 1.0 / (1.0 + np.exp(-logits))
    return made


def moments(seconds: Numbers) -> pa.Array:
    """Returns times, given in seconds since START."""
    return pa.array(START + seconds.astype("timedelta64[s]")).cast(pa.timestamp("us"))


def prepare_ratings(folder: Path) -> dict[str, Keys]:
    """Writes MovieLens-100K's ratings with timestamps and weights. Returns the name of each model -> its config."""
    _, config = read_values(MOVIELENS, None)
    ratings = pq.read_table(config["source"]["path"]).sort_by("timestamp").drop(["day", "split"])
    at = pa.array(ratings.column("timestamp").to_numpy().astype("datetime64[s]")).cast(pa.timestamp("us"))
    stars = pc.subtract(ratings.column("rating").cast(pa.float64()), 3.5)
    pq.write_table(ratings.append_column("at", at).append_column("stars", stars), folder / "ratings.parquet")
    days = at.cast(pa.date32()).to_pylist()
    valid, test = (days[int(len(days) * share)] for share in (1 - VALID_SHARE - TEST_SHARE, 1 - TEST_SHARE))
    later = {day: next(one for one in days if one > day) for day in (valid, test)}
    split = {
        "train": [f"{days[0]}..{valid}"],
        "valid": [f"{later[valid]}..{test}"],
        "test": [f"{later[test]}..{days[-1]}"],
    }
    config["source"] |= {"path": f"{folder}/ratings.parquet", "day_column": "at"}
    config |= {"split": {"days": split}, "evaluation": {}}
    log = {"table": config["name"], "on": "user_id", "time": "at", "as_of": "at"}
    features = config["features"] | {"dense": [{"columns": ["age"]}]}  # later days have times that no model has seen
    mean_stars = {"delay_seconds": 1, "columns": "stars", "seconds": [10**9], "take": ["mean"], "prefix": "seen_"}
    models = {
        "no history": features,
        "mean of stars": features
        | {"windows": [log | mean_stars], "dense": [{"columns": ["age", "seen_stars_mean_1000000000"]}]},
    }
    hashed = [{"kind": "sigrid_hash", "size": 8_192}]
    seen = {"columns": ["seen_item_id"], "weights": "seen_stars", "pooling": "mean", "transforms": hashed}
    for delay, name in ((1, ""), (3_600, ", an hour late")):
        for length in LENGTHS:
            history = log | {"delay_seconds": delay, "last": length, "columns": ["item_id", "stars"], "prefix": "seen_"}
            models[f"last {length}{name}"] = features | {
                "histories": [history], "sparse": [*features["sparse"], seen],
            }  # fmt: skip
    return {name: config | {"features": one} for name, one in models.items()}


def measure(part: str, models: Mapping[str, Keys], seeds: Sequence[int], folder: Path) -> list[Learned]:
    """Trains each model with each seed, all on one table."""
    found = []
    for number, (name, config) in enumerate(models.items()):
        results = []
        for seed in seeds:
            began = time.perf_counter()
            keys = {
                "home": f"{folder}/home", "seed": seed, "registration.model_name": f"model{number}_seed{seed}",
                "training.world_size": 1, "evaluation.importance_rows": None,
            }  # fmt: skip
            workspace = Workspace(load(config, keys))
            ingest_days(workspace, None, False)
            results.append(train_version(workspace, None, False)["eval"])
            say(f"{part}, {name}, seed {seed}: NE {results[-1]['ne']:.4f}, {time.perf_counter() - began:.0f} s")
        found.append(
            Learned(
                part=part, model=name, rows=results[0]["rows"], ne=tuple(one["ne"] for one in results),
                auc=tuple(one["auc"] for one in results), ne_floor=results[0]["ne_floor"],
            )
        )  # fmt: skip
    return found


def render(found: Sequence[Learned]) -> str:
    """Formats the results as a Markdown table."""
    lines = ["| part | model | NE | +- | AUC | NE floor |", "|---|---|---|---|---|---|"]
    for one in found:
        spread = (max(one.ne) - min(one.ne)) / 2
        floor = "" if one.ne_floor is None else f"{one.ne_floor:.4f}"
        cells = [one.part, one.model, f"{mean(one.ne):.4f}", f"{spread:.4f}", f"{mean(one.auc):.4f}", floor]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Measures the parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="generated, ratings; both, if none is given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=200_000, help="generated samples")
    parser.add_argument("--users", type=int, default=1_000, help="users of the generated samples")
    parser.add_argument("--data", help="folder with ml100k; DLRM_DATA, if it is not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.parts) - {"generated", "ratings"}:
        parser.error(f"expected parts generated, ratings, got {', '.join(sorted(unknown))}")
    if chosen.data:
        os.environ["DLRM_DATA"] = str(Path(chosen.data).resolve())
    for name in ("DLRM_HOME", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    set_environment()
    quiet_libraries()
    logging.getLogger("dlrm").setLevel(logging.ERROR)
    found: list[Learned] = []
    for part in chosen.parts or ("generated", "ratings"):
        missing = missing_data(MOVIELENS) if part == "ratings" else None
        if missing is not None:
            say(f"{part} is left out: {missing}")
            continue
        with tempfile.TemporaryDirectory(prefix="dlrm-histories-") as temporary:
            folder = Path(temporary)
            models = prepare_ratings(folder) if part == "ratings" else generate(folder, chosen.rows, chosen.users)
            found += measure(part, models, chosen.seeds, folder)
    print(render(found))
    facts = machine(PACKAGES)
    say(describe_machine(facts))
    if chosen.json:
        print(json.dumps({**facts, "results": [one.model_dump() for one in found]}))


if __name__ == "__main__":
    main(sys.argv[1:])
