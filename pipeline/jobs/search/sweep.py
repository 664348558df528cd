"""A sweep: its search space, its trials, then the best config as a file, figures and a table."""

import json
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, TrainingError
from pipeline.evaluation.metrics import format_metric
from pipeline.evaluation.record import markdown_table
from pipeline.jobs.console import Progress, step
from pipeline.jobs.search.trials import (
    BEST_NE,
    RESULT,
    STUDY,
    Search,
    SearchJob,
    Trials,
    check_parallel,
    describe_outcome,
    open_search,
    override,
    pin_search,
    read_result,
    resolve_ranked,
)
from pipeline.jobs.training.identity import LEARNED, describe_rows, semantics
from pipeline.jobs.workspace import Workspace
from pipeline.search import plots
from pipeline.search.config import SweepConfig
from pipeline.search.grid import count_trials
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from storage.artifacts import write_text

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
    job, config = pin_sweep(workspace, snapshot_id, force), workspace.config
    done = load_result(workspace, job)
    if done is not None:
        return done
    with open_search(workspace, job, "sweep", f"sweep of {config.name}", config.sweep) as sweep:
        (sweep.folder / RESULT).unlink(missing_ok=True)  # a result of fewer trials
        study = SearchStudy(sweep.folder / STUDY, config.sweep, read_own_values(config))
        run_trials(sweep, study)
        return conclude(sweep, study)


def pin_sweep(workspace: Workspace, snapshot_id: int | None, force: bool) -> SearchJob:
    """Pins the sweep of a config and a snapshot, and checks it before anything runs.

    Raises:
        ConfigError: If a key cannot be searched, or a value of it does not fit the config.
    """
    config = workspace.config
    check_space(config)
    snapshot, data = resolve_ranked(workspace, snapshot_id)
    inputs = {"config": semantics(workspace, evaluation=True), "sweep": config.sweep.identity()}
    rows = {"plan": data["train"].plan.hash, **describe_rows(workspace.warehouse, data, LEARNED)}
    return pin_search(workspace, "sweep", snapshot, rows, inputs, force)


def check_space(config: RunConfig) -> None:
    """Refuses keys that cannot be searched. Puts each of their values into the config to check it.

    Raises:
        ConfigError: Names the key.
    """
    plain = drop_sweep(config)
    if not config.sweep.space:
        expected = "at least one key with its values"
        raise ConfigError("sweep.space", expected, "none", "Add one: `training.table_learning_rate: {low: .01, ...}`.")
    for key, dimension in config.sweep.space.items():
        ends = dimension.choices if dimension.choices is not None else (dimension.low, dimension.high)
        learned = [override("sweep.space", plain, {key: value}).semantics() for value in ends]
        if len(learned) > 1 and all(other == learned[0] for other in learned[1:]):
            raise ConfigError(f"sweep.space '{key}'", "a key that changes what is learned", "none", "Leave it out.")
    trial = override("sweep.trial_overrides", plain, config.sweep.trial_overrides)
    check_parallel("sweep.parallel", config.sweep.parallel, trial.training.launcher, trial.preprocessing.executor)


def drop_sweep(config: RunConfig) -> RunConfig:
    """Returns the config without its sweep."""
    return config.model_copy(update={"sweep": SweepConfig()})


def read_own_values(config: RunConfig) -> dict[str, Any]:
    """Returns key -> the config's own value, for keys that are searched. Leaves out values outside the space."""
    values = config.model_dump(mode="json")
    found = {key: _look_up(values, key) for key in config.sweep.space}
    return {key: value for key, value in found.items() if config.sweep.space[key].holds(value)}


def _look_up(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else (values or {}).get(part)
    return values


class _Swept(BaseModel, frozen=True):
    """What `load_result` reads of a result."""

    trials: Mapping[str, int]
    config_path: str


def load_result(workspace: Workspace, job: SearchJob) -> dict[str, Any] | None:
    """Returns the result of a sweep that is done with as many trials, else None."""
    result = read_result(job, _Swept)
    if result is None or sum(result["trials"].values()) < count_trials(workspace.config.sweep):
        return None
    if not os.path.exists(result["config_path"]):  # unlike Path.exists, takes any text
        return None
    advice = "force=true starts a new one, a larger sweep.trials adds trials"
    workspace.console.log.info("skipped: sweep %s is done; %s", job.name, advice)
    return result | {"status": "skipped"}


def run_trials(sweep: Search, study: SearchStudy) -> None:
    """Runs the remaining trials."""
    log, config, records = sweep.console.log, sweep.workspace.config, study.records()
    if records:
        log.info("sweep %s resumes: %s", sweep.job.name, describe_counts(records))
    with sweep.console.progress("trials", quiet=True) as progress:  # on the run's page: the log has a line for each

        def describe(draw: Draw) -> tuple[str, dict[str, str]]:
            return f"trial {draw.number}", {"dlrm.trial": str(draw.number)}

        make, report = partial(make_config, sweep), partial(log_trial, sweep, study, progress)
        Trials(sweep, study, sweep.folder, make, describe, report).run_all(config.sweep.parallel)


def make_config(sweep: Search, params: Mapping[str, Any]) -> RunConfig:
    """Returns the config of a trial, with the overrides of all trials."""
    config = sweep.workspace.config
    return load(drop_sweep(config), {**config.sweep.trial_overrides, **params})


def log_trial(sweep: Search, study: SearchStudy, progress: Progress, record: TrialRecord) -> None:
    """Logs a finished trial, its point in MLflow, and the best config so far."""
    ended, best, number = study.done, study.best, record.number
    done, seconds = len(ended), [one.seconds for one in ended if one.seconds is not None]
    line = f"trial {number}: {describe_outcome(record)}; {done} of {study.total} done"
    note = f"best NE {format_metric(best.valid_ne)} (trial {best.number})" if best else "none has an NE"
    minutes = statistics.median(seconds) * (study.total - done) / study.config.parallel / 60
    note += f", about {minutes:.0f} min left" if minutes >= 1 else ""
    sweep.console.log.info("%s, %s: %s", line, note, describe_params(record.params))
    progress("trials", done, study.total, note)
    if best is not None:
        nes = {"trial_valid_ne": record.valid_ne, BEST_NE: best.valid_ne}
        sweep.workspace.tracking.log(sweep.run_id, number, nes)
        write_best(sweep, best)


def write_best(sweep: Search, best: TrialRecord) -> Path:
    """Writes the best trial's config as a file over the searched config, without the overrides of all trials."""
    path, plain = sweep.folder / BEST, drop_sweep(sweep.workspace.config)
    text = yaml.safe_dump(plain.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_text(sweep.folder / BASE, text, mode=0o600)  # it may hold the catalog's credentials
    values = nest_values(load(plain, best.params).model_dump(mode="json"), best.params)
    head = f"# Trial {best.number} of sweep {sweep.job.name}: NE {format_metric(best.valid_ne)} on the validation rows."
    text = yaml.safe_dump({"base": BASE} | values, sort_keys=False, allow_unicode=True)
    write_text(path, f"{head}\n{text}")
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
def conclude(sweep: Search, study: SearchStudy) -> dict[str, Any]:
    """All trials -> the result, figures and a table. Safe to repeat: it replaces itself.

    Raises:
        TrainingError: If no trial has an NE.
    """
    records, best, tracker = study.records(), study.best, sweep.workspace.tracking
    tracker.log_json(sweep.run_id, [record.model_dump() for record in records], "trials.json")
    if best is None:
        errors = [str(record.notes["error"]) for record in records if "error" in record.notes]
        raise TrainingError(
            "sweep", "one trial that ends with an NE",
            f"{describe_counts(records)}; the first: {(errors or ['pruned'])[0]}", "Change space, limits or pruning.",
        )  # fmt: skip
    path, ne = write_best(sweep, best), format_metric(best.valid_ne)
    shares: dict[str, float] = {}
    with sweep.workspace.best_effort("importances"):
        shares = study.importances()
    with sweep.workspace.best_effort("figures"):
        tracker.log_figures(sweep.run_id, plots.draw_sweep(study))
    tracker.log_file(sweep.run_id, path)
    text = f"Best: trial {best.number}, NE {ne} on the validation rows, `{BEST}`.\n\n"
    text += render_table(records, list(study.config.space))
    tags = {f"best.{key}": json.dumps(value) for key, value in best.params.items()}
    result = {
        "study": sweep.job.name,
        "trials": dict(Counter(record.state for record in records)),
        "best": {"number": best.number, "params": dict(best.params), "valid_ne": best.valid_ne},
        "importances": shares,
        "config_path": str(path),
    }
    sweep.console.log.info("best: trial %s, NE %s: %s", best.number, ne, describe_params(best.params))
    return sweep.conclude(text, {"dlrm.best_trial": str(best.number)} | tags, result)


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
