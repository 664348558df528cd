"""The trials of a sweep, side by side."""

import contextvars
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.candidate import BEST_NE, StoppedEarly, candidate_job, train_candidate
from flows.judging import in_a_line
from flows.record import shown
from flows.sweep_job import Sweep
from flows.sweep_result import in_numbers, in_words, write_best
from pipeline.errors import ContractError, TrackingError
from pipeline.registration.tracking import unanswered
from pipeline.search.study import Draw
from pipeline.training.launch import Event


def run_trials(sweep: Sweep) -> None:
    """Runs what is left of the trials, `parallel` at a time.

    A trial that fails costs itself alone. If MLflow is away or the process is interrupted, the others are ended, too,
    and go on from their checkpoints when the same command is run again.
    """
    records = sweep.study.records()
    if records:
        get_run_logger().info("sweep %s goes on: %s", sweep.job.name, in_numbers(records))
    places = range(sweep.config.sweep.parallel)
    with sweep.progress, ThreadPoolExecutor(len(places), thread_name_prefix="trial") as pool:
        try:
            workers = [pool.submit(contextvars.copy_context().run, _work, sweep) for _ in places]
            for worker in as_completed(workers):
                worker.result()
        finally:
            sweep.stop.set()


def _work(sweep: Sweep) -> None:
    """One trial after the other, until there are enough."""
    while not sweep.stop.is_set() and (draw := sweep.study.next()) is not None:
        try:
            run_trial(sweep, draw)
        except Exception as error:  # whatever is wrong with this trial, the others go on
            if sweep.stop.is_set() or isinstance(error, TrackingError) or unanswered(error):
                raise
            sweep.study.fail(draw.number, str(error) if isinstance(error, ContractError) else in_a_line(error))
        tell(sweep, draw.number)


@task(cache_policy=NO_CACHE, task_run_name="trial {draw.number}")
def run_trial(sweep: Sweep, draw: Draw) -> None:
    """One trial, from its values to its NE. Safe to repeat: it goes on from its last checkpoint."""
    study, number = sweep.study, draw.number
    get_run_logger().info("trial %s: %s", number, in_words(draw.params))
    twin = study.twin(draw)
    if twin is not None and twin.valid_ne is not None:
        study.note(number, same_as=twin.number)
        return study.finish(number, twin.valid_ne)
    if study.falls_behind(number):
        return study.prune(number)
    config, snapshot = sweep.settings(draw.params), sweep.job.snapshot.snapshot_id
    plans, folder = sweep.folder / "plans", sweep.trial_folder(number)
    job = candidate_job(config, sweep.job.identity, snapshot, folder, plans)
    tags = {"mlflow.parentRunId": sweep.run_id, "dlrm.trial": str(number), "mlflow.source.name": "flows.sweep"}
    outcome = train_candidate(config, job, f"trial {number}", tags, partial(watch, sweep, number))
    study.note(number, mlflow_run_id=outcome.run_id)
    return study.prune(number) if outcome.valid_ne is None else study.finish(number, outcome.valid_ne)


def watch(sweep: Sweep, number: int, event: Event | None) -> None:
    """Ends a trial that falls behind, or all of them when the sweep ends.

    Raises:
        StoppedEarly: If it falls behind.
        KeyboardInterrupt: If the sweep ends.
    """
    if sweep.stop.is_set():
        raise KeyboardInterrupt
    prune = sweep.config.sweep.prune
    if prune is None or event is None or event["event"] != "metrics":
        return
    ne = event["metrics"].get(prune.metric)
    if ne is not None and sweep.study.report(number, event["rows"], ne):
        raise StoppedEarly


def tell(sweep: Sweep, number: int) -> None:
    """What is known after a trial: a line for people, a point in MLflow, the best config so far."""
    with sweep.lock:
        done, best = sweep.done(), sweep.study.best
        record = next(record for record in done if record.number == number)
        result = {"complete": f"NE {shown(record.valid_ne)}", "failed": f"failed: {record.notes.get('error')}"}
        line = f"trial {number}: {result.get(record.state, record.state)}; "
        line += f"{len(done)} of {sweep.config.sweep.most_trials} done"
        note = f"best NE {shown(best.valid_ne)} (trial {best.number})" if best else "none has an NE"
        note += sweep.time_left(len(done))
        get_run_logger().info("%s, %s", line, note)
        sweep.progress.page.show("trials", len(done), sweep.config.sweep.most_trials, note)
        if best is not None:
            sweep.tracker.log(sweep.run_id, number, {"trial_valid_ne": record.valid_ne, BEST_NE: best.valid_ne})
            write_best(sweep, best)
        sweep.tidy(record)
