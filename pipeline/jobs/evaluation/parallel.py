"""Scores the evaluation rows in portions, in this process, in several, or on the nodes of a Ray cluster."""

import math
import multiprocessing
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing

from pipeline.data.selection import require_row_count
from pipeline.evaluation.evaluate import Evaluation, OrderedMerge
from pipeline.jobs.console import Progress
from pipeline.jobs.evaluation.scorers import Comparison, PortionScorer, PortionSums, score_portion
from pipeline.jobs.workspace import Workspace
from pipeline.processes.process import die_with_parent
from storage.reader import Fragment

PORTIONS = 64
"""Most pieces of work that the evaluation rows are cut into, for any number of workers: float sums depend on which rows
are added up together."""
LEAST_CLUSTER_VALUES = 8_000_000
"""Fewer values, rows times columns, are scored on this machine: it is done before processes on a cluster have begun."""


def evaluate_portions(
    workspace: Workspace, comparison: Comparison, fragments: Sequence[Fragment], total: int, progress: Progress
) -> tuple[Evaluation, str | None]:
    """Scores all fragments, on the Ray cluster of the config if they are many. Returns their sums, and why the champion
    failed if it did.

    Args:
        total: Number of rows.
    """
    size = math.ceil(len(fragments) / PORTIONS) or 1
    portions = [fragments[start : start + size] for start in range(0, len(fragments), size)]
    values = total * len(comparison.spec.plan.columns)
    if workspace.config.uses_cluster and values >= LEAST_CLUSTER_VALUES:
        from pipeline.jobs.evaluation.ray_parallel import score_on_cluster  # Ray is an extra

        scored = score_on_cluster(workspace, comparison, portions)
    else:
        scored = _score_here(comparison, portions)
    merged, seen, failed = OrderedMerge(comparison.empty(comparison.groups)), 0, None
    with closing(scored):
        for number, (done, evaluation, error) in scored:
            merged.add(number, evaluation)
            seen, failed = seen + done, failed or error
            progress("evaluate", seen, total)
    require_row_count(seen, comparison.spec.rows, "the evaluation")
    return merged.whole, failed


def _score_here(comparison: Comparison, portions: Sequence[Sequence[Fragment]]) -> Generator[tuple[int, PortionSums]]:
    """Yields the number of each portion and its sums, in the order they finish."""
    workers = comparison.evaluation.workers
    if workers == 1:
        scorer = PortionScorer(comparison)
        yield from ((number, scorer.score(part, comparison.groups)) for number, part in enumerate(portions))
        return
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), die_with_parent, (os.getpid(),)
    ) as pool:  # fmt: skip
        try:
            numbers = {pool.submit(score_portion, comparison, part): number for number, part in enumerate(portions)}
            for future in as_completed(list(numbers)):
                yield numbers.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
