"""The trials of a sweep, side by side."""

from functools import partial

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from pipeline.evaluation.metrics import format_metric
from pipeline.jobs.search.candidate import BEST_NE
from pipeline.jobs.search.sweep import SOURCE, Sweep
from pipeline.jobs.search.sweep_result import in_numbers, in_words, write_best
from pipeline.search.grid import count_trials
from pipeline.search.study import Draw, TrialRecord


def run_trials(sweep: Sweep) -> None:
    """Runs what is left of the trials, `parallel` at a time."""
    records = sweep.study.records()
    if records:
        get_run_logger().info("sweep %s goes on: %s", sweep.job.name, in_numbers(records))
    with sweep.progress:
        sweep.run_all(sweep.config.sweep.parallel, partial(run_trial, sweep), partial(tell, sweep))


@task(cache_policy=NO_CACHE, task_run_name="trial {draw.number}")
def run_trial(sweep: Sweep, draw: Draw) -> None:
    """One trial, from its values to its NE. Safe to repeat: it goes on from its last checkpoint."""
    study, number = sweep.study, draw.number
    get_run_logger().info("trial %s: %s", number, in_words(draw.params))
    twin = study.twin(draw)
    if twin is not None and twin.valid_ne is not None:
        study.note(number, same_as=twin.number)
        return study.finish(number, twin.valid_ne)
    tags = {"dlrm.trial": str(number), "mlflow.source.name": SOURCE}
    return sweep.train(number, sweep.settings(draw.params), f"trial {number}", tags)


def tell(sweep: Sweep, record: TrialRecord) -> None:
    """What is known after a trial: a line for people, a point in MLflow, the best config so far."""
    done, best, number = sweep.done(), sweep.study.best, record.number
    result = {"complete": f"NE {format_metric(record.valid_ne)}", "failed": f"failed: {record.notes.get('error')}"}
    line = f"trial {number}: {result.get(record.state, record.state)}; "
    line += f"{len(done)} of {count_trials(sweep.config.sweep)} done"
    note = f"best NE {format_metric(best.valid_ne)} (trial {best.number})" if best else "none has an NE"
    note += sweep.time_left(len(done))
    get_run_logger().info("%s, %s", line, note)
    sweep.progress.page.show("trials", len(done), count_trials(sweep.config.sweep), note)
    if best is not None:
        sweep.tracker.log(sweep.run_id, number, {"trial_valid_ne": record.valid_ne, BEST_NE: best.valid_ne})
        write_best(sweep, best)
