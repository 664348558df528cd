"""Tunes a suggested config on its validation rows, and writes the best values into its file."""

import time
from typing import Any

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.evaluation.metrics import format_metric
from pipeline.jobs.features.suggest import Written, named, write
from pipeline.jobs.ingest.ingest import ingest_days
from pipeline.jobs.search.sweep import run_sweep
from pipeline.jobs.workspace import Workspace

MOST_TRIALS = 200
"""Most trials of a search that is limited by time."""


def search_space(config: RunConfig) -> dict[str, Any]:
    """Returns the keys to search and their values, around those of the config."""
    training, model = config.training, config.model
    rate, dense, width = training.table_learning_rate, training.dense_learning_rate, model.embedding_width
    return {
        "training.table_learning_rate": {"low": rate / 4, "high": rate * 4, "log": True},
        "training.table_weight_decay": {"low": 1e-7, "high": 1e-2, "log": True},
        "training.dense_learning_rate": {"low": dense / 4, "high": dense * 4, "log": True},
        "training.batch_rows": {"choices": [max(32, training.batch_rows // 2), training.batch_rows]},
        "model.embedding_width": {"choices": sorted({max(4, width // 2), width, width * 2})},
        "model.dropout": {"low": 0.0, "high": 0.5},
        "model.interaction": {"choices": ["dot", "dcn", "cat"]},
    }


def tune(written: Written, trials: int | None, minutes: float | None) -> dict[str, Any]:
    """Ingests the rows, searches the values of a suggested config, and writes the best into its file.

    Args:
        trials: Trainings to make. None: as many as the time allows.
        minutes: Time for them; the one that runs when it is over ends as usual. None: no limit.
    Raises:
        ConfigError: If the config has no validation rows to judge by.
    """
    if not written.suggestion.split.validates:
        raise ConfigError(
            "suggest, trials", "validation rows", "a split without them", "Add them, or leave trials and minutes out."
        )
    began = time.monotonic()
    config, console = load(written.path), written.job.console
    space = {key: values for key, values in search_space(config).items() if key not in named(written.job)}
    ingest_days(Workspace(config, console), None, False)
    wanted = trials or MOST_TRIALS
    done, result = 0, {}
    while done < wanted:
        done = wanted if minutes is None else done + 1
        overrides = {"sweep": {"trials": done, "space": space, "seed": config.seed}}
        result = run_sweep(Workspace(load(written.path, overrides), console), None, False)
        used = time.monotonic() - began
        if minutes is not None and used * (done + 1) / done > 60.0 * minutes:
            break
    return _write_best(written, result)


def _try_history(tuned: Written, without: float) -> str:
    """Trains the same values with the suggested history, and says what it gains on the validation rows.

    Args:
        without: NE of the validation rows without it.
    """
    config, console = load(str(tuned.history)), tuned.job.console
    ingest_days(Workspace(config, console), None, False)
    space = {key: values for key, values in search_space(config).items() if key == "training.table_weight_decay"}
    overrides = {"sweep": {"trials": 1, "space": space, "seed": config.seed}}  # the first trial is the config itself
    ne = run_sweep(Workspace(load(str(tuned.history), overrides), console), None, False)["best"]["valid_ne"]
    word = "lower" if ne < without else "no lower"
    numbers = f"{format_metric(ne)} with it, {format_metric(without)} without"
    return f"a history of each {config.features.histories[0].on[0]} has a {word} NE on the validation rows: {numbers}"


def _write_best(written: Written, result: dict[str, Any]) -> dict[str, Any]:
    best, count = result["best"], sum(result["trials"].values())
    values: dict[str, dict[str, Any]] = {}
    for key, value in best["params"].items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    note = f"model and training: the best of {count} trials, NE {format_metric(best['valid_ne'])} on validation rows"
    seen = written.seen.with_note(note)
    tuned = write(written.job, seen, values)
    written.job.console.log.info("%s: %s", note, tuned.path)
    if tuned.history is not None:
        gain = _try_history(tuned, best["valid_ne"])
        tuned = write(written.job, seen.with_note(gain), values)
        written.job.console.log.info("%s", gain)
    return tuned.describe() | {"sweep": {key: result[key] for key in ("study", "trials", "best", "importances")}}
