"""Runs a sweep: its trials, several at a time, then the best config as a file, figures and a table."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import load
from pipeline.errors import TrainingError
from pipeline.evaluation.metrics import format_metric
from pipeline.evaluation.record import markdown_table
from pipeline.jobs.console import step
from pipeline.jobs.search.candidate import BEST_NE
from pipeline.jobs.search.sweep import SOURCE, Sweep, drop_sweep, load_result, open_sweep, pin_sweep
from pipeline.jobs.search.trials import RESULT
from pipeline.jobs.workspace import Workspace
from pipeline.search import plots
from pipeline.search.grid import count_trials
from pipeline.search.study import Draw, TrialRecord
from storage.artifacts import write_json, write_text

BASE, BEST = "base.yaml", "best.yaml"
"""Files in a sweep's folder: the config that is searched, and the best trial's values over it."""
MOST_ROWS = 50
"""Most trials in a table for people."""


def run_sweep(workspace: Workspace, snapshot_id: int | None, force: bool) -> dict[str, Any]:
    """Runs a sweep, resumes it, or returns its result where it is done.

    Args:
        snapshot_id: Snapshot to read; None takes the newest.
        force: Starts a new sweep where the same one is done.
    """
    job = pin_sweep(workspace, snapshot_id, force)
    done = load_result(workspace, job)
    if done is not None:
        return done
    with open_sweep(workspace, job) as sweep:
        run_trials(sweep)
        return conclude(sweep)


def run_trials(sweep: Sweep) -> None:
    """Runs the remaining trials, `parallel` at a time."""
    records = sweep.study.records()
    if records:
        sweep.console.log.info("sweep %s resumes: %s", sweep.job.name, describe_counts(records))
    with sweep.progress:
        sweep.run_all(sweep.config.sweep.parallel, partial(run_trial, sweep), partial(log_trial, sweep))


@step("trial {draw.number}")
def run_trial(sweep: Sweep, draw: Draw) -> None:
    """Runs a trial from its values to its NE. Safe to repeat: it resumes from its last checkpoint."""
    study, number = sweep.study, draw.number
    sweep.console.log.info("trial %s: %s", number, describe_params(draw.params))
    twin = study.twin(draw)
    if twin is not None and twin.valid_ne is not None:
        study.note(number, same_as=twin.number)
        return study.finish(number, twin.valid_ne)
    tags = {"dlrm.trial": str(number), "mlflow.source.name": SOURCE}
    return sweep.train(number, sweep.make_config(draw.params), f"trial {number}", tags)


def log_trial(sweep: Sweep, record: TrialRecord) -> None:
    """Logs a finished trial, its point in MLflow, and the best config so far."""
    done, best, number = sweep.list_done(), sweep.study.best, record.number
    result = {"complete": f"NE {format_metric(record.valid_ne)}", "failed": f"failed: {record.notes.get('error')}"}
    line = f"trial {number}: {result.get(record.state, record.state)}; "
    line += f"{len(done)} of {count_trials(sweep.config.sweep)} done"
    note = f"best NE {format_metric(best.valid_ne)} (trial {best.number})" if best else "none has an NE"
    note += sweep.describe_time_left(len(done))
    sweep.console.log.info("%s, %s", line, note)
    sweep.progress("trials", len(done), count_trials(sweep.config.sweep), note)
    if best is not None:
        sweep.workspace.tracking.log(sweep.run_id, number, {"trial_valid_ne": record.valid_ne, BEST_NE: best.valid_ne})
        write_best(sweep, best)


def write_best(sweep: Sweep, best: TrialRecord) -> Path:
    """Writes the best trial's config as a file over the searched config, without the overrides of all trials."""
    base, path = sweep.folder / BASE, sweep.folder / BEST
    plain = drop_sweep(sweep.config)
    text = yaml.safe_dump(plain.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_text(base, text, mode=0o600)  # it may hold the catalog's credentials
    values = load(plain, best.params).model_dump(mode="json")
    head = (
        f"# Trial {best.number} of sweep {sweep.job.name}: NE {format_metric(best.valid_ne)} on the validation rows.\n"
    )
    over = yaml.safe_dump({"base": BASE} | nest_values(values, best.params), sort_keys=False, allow_unicode=True)
    write_text(path, head + over)
    return path


def nest_values(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a config that dotted keys name. Lists are whole: a file's list replaces its base's.

    Example:
        >>> nest_values({"a": {"b": 1, "c": [{"d": 2}, 3]}}, {"a.b": 1, "a.c.0.d": 2})
        {'a': {'b': 1, 'c': [{'d': 2}, 3]}}
    """
    found: dict[str, Any] = {}
    for key in keys:
        *sections, last = key.split(".")
        inner, into = values, found
        for name in sections:
            if isinstance(inner[name], list):
                last = name
                break
            inner, into = inner[name], into.setdefault(name, {})
        into[last] = inner[last]
    return found


@step("conclude")
def conclude(sweep: Sweep) -> dict[str, Any]:
    """All trials -> the result, figures and a table. Safe to repeat: it replaces itself.

    Raises:
        TrainingError: If no trial has an NE.
    """
    records, best, tracker = sweep.study.records(), sweep.study.best, sweep.workspace.tracking
    tracker.log_json(sweep.run_id, [record.model_dump() for record in records], "trials.json")
    if best is None:
        errors = [str(record.notes["error"]) for record in records if "error" in record.notes]
        raise TrainingError(
            "sweep", "one trial that ends with an NE",
            f"{describe_counts(records)}; the first: {(errors or ['pruned'])[0]}", "Change space, limits or pruning.",
        )  # fmt: skip
    path, space = write_best(sweep, best), sweep.config.sweep.space
    shares: dict[str, float] = {}
    with sweep.workspace.best_effort("importances"):
        shares = sweep.study.importances()
    with sweep.workspace.best_effort("figures"):
        tracker.log_figures(sweep.run_id, plots.draw_sweep(sweep.study))
    tracker.log_file(sweep.run_id, path)
    table = render_table(records, list(space))
    head = f"Best: trial {best.number}, NE {format_metric(best.valid_ne)} on the validation rows, `{BEST}`.\n\n"
    tags = {f"best.{key}": json.dumps(value) for key, value in best.params.items()}
    tracker.tag(sweep.run_id, {"mlflow.note.content": head + table, "dlrm.best_trial": str(best.number)} | tags)
    with sweep.workspace.best_effort("page in Prefect"):
        sweep.console.show_text("sweep", sweep.config.name, f"# Sweep {sweep.job.name}\n\n{head}{table}")
    result = {
        "status": "ok",
        "study": sweep.job.name,
        "snapshot_id": sweep.job.snapshot.snapshot_id,
        "trials": dict(Counter(record.state for record in records)),
        "best": {"number": best.number, "params": dict(best.params), "valid_ne": best.valid_ne},
        "importances": shares,
        "config_path": str(path),
        "mlflow_run_id": sweep.run_id,
    }
    write_json(sweep.folder / RESULT, result)
    sweep.console.log.info(
        "best: trial %s, NE %s: %s", best.number, format_metric(best.valid_ne), describe_params(best.params)
    )
    return result


def describe_counts(records: Sequence[TrialRecord]) -> str:
    """Returns the number of trials in each state, in words."""
    counts = Counter(record.state for record in records)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def describe_params(params: Mapping[str, Any]) -> str:
    """Returns the values of a trial as one line.

    Example:
        >>> describe_params({"training.table_learning_rate": 0.0123456, "model.bottom_mlp": [32]})
        'training.table_learning_rate=0.01235, model.bottom_mlp=[32]'
    """
    return ", ".join(f"{key}={_format_value(value)}" for key, value in params.items())


def render_table(records: Sequence[TrialRecord], keys: Sequence[str]) -> str:
    """Returns the trials as a markdown table, the best first."""
    order = sorted(records, key=lambda record: (record.valid_ne is None, record.valid_ne, record.number))
    rows = []
    for record in order[:MOST_ROWS]:
        ne = format_metric(record.valid_ne) if record.state == "complete" else record.state
        rows.append([f"{record.number}", ne, *(_format_value(record.params.get(key)) for key in keys)])
    return markdown_table(["trial", "NE", *(f"`{key}`" for key in keys)], rows)


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).replace("|", "\\|")
