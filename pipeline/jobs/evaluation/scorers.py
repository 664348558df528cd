"""Scores raw evaluation rows with the new model and the champion, a portion of the rows at a time."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel

from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.metrics import Floats
from pipeline.inference.model import BATCH_ROWS, LoadedModel
from pipeline.jobs.console import one_line
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from storage.reader import Fragment

PortionSums = tuple[int, Evaluation, str | None]
"""Number of rows, their sums, and why the champion failed if it did."""


class Comparison(BaseModel, frozen=True):
    """All that a process needs to score some of the evaluation rows."""

    spec: DataSpec
    evaluation: EvaluationConfig
    units: str
    model: Path
    exact: Path | None
    """The model before its tables were rounded. None: they were not."""
    champion: Path | None
    groups: Path
    """Folder for the predictions that GAUC groups."""
    model_names: Mapping[str, str] = {}
    """Column of the model -> its name in the rows, where that is another."""
    champion_names: Mapping[str, str] = {}
    """The same of the champion."""

    def empty(self, groups: Path) -> Evaluation:
        """Returns the sums of no rows."""
        return Evaluation(self.evaluation, self.units, groups)


class RowScorer:
    """Scores raw rows, whose batches share the threads of PyTorch.

    Each batch has one thread: the last bits of a matrix product depend on the number of its threads.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.threads = ThreadPoolExecutor(torch.get_num_threads(), "score", torch.set_num_threads, (1,))

    def score(self, rows: pa.Table) -> Floats:
        """Returns the probabilities, float64 [N]."""
        batches = [rows.slice(start, BATCH_ROWS) for start in range(0, rows.num_rows, BATCH_ROWS)]
        return np.concatenate([np.empty(0), *self.threads.map(self.model.score, batches)])


class ChampionScorer:
    """Scores rows with the champion, until it fails once.

    Args:
        folder: Its packed model; None: there is none.
        load: Loads a packed model.
    """

    def __init__(self, folder: Path | None, load: Callable[[Path], LoadedModel]) -> None:
        self.folder, self.load = folder, load
        self.model: RowScorer | None = None
        self.error: str | None = None

    def score(self, rows: pa.Table) -> Floats | None:
        """Returns the probabilities of raw rows. None: there is no champion, or it has failed."""
        if self.folder is None or self.error is not None:
            return None
        try:
            self.model = self.model or RowScorer(self.load(self.folder))
            return self.model.score(rows)
        except Exception as error:  # a broken champion must not cost the new model
            self.error = one_line(error)
            return None


class PortionScorer:
    """Scores portions of the evaluation rows in this process, with models that are loaded once.

    Args:
        load: Loads a packed model.
    """

    def __init__(self, comparison: Comparison, load: Callable[[Path], LoadedModel] = LoadedModel) -> None:
        self.comparison, self.worker = comparison, Worker(comparison.spec)
        self.model, self.champion = RowScorer(load(comparison.model)), ChampionScorer(comparison.champion, load)
        self.exact = None if comparison.exact is None else RowScorer(load(comparison.exact))

    def score(self, fragments: Sequence[Fragment], groups: Path) -> PortionSums:
        """Returns the sums of the rows of some fragments.

        Rows are scored fragment by fragment: arithmetic may differ in its last bits between batches of different sizes.

        Args:
            groups: Folder for the predictions that GAUC groups.
        """
        evaluation, done = self.comparison.empty(groups), 0
        for fragment in fragments:
            rows = self.worker.read_selected(fragment)
            labels, weights = read_outcomes(self.worker, rows, fragment)
            extra = rows.select(list(self.comparison.spec.extra))
            exact = None if self.exact is None else self.exact.score(rows)
            champion = self.champion.score(rename_columns(rows, self.comparison.champion_names))
            scores = self.model.score(rename_columns(rows, self.comparison.model_names))
            evaluation.add(ScoredRows(labels, scores, extra, champion, exact, weights))
            done += rows.num_rows
        evaluation.close()
        return done, evaluation, self.champion.error


def rename_columns(rows: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """Returns rows in which columns have the names that a model reads.

    Args:
        names: Column of the model -> its name in the rows.
    Example:
        >>> rename_columns(pa.table({"ids": [1], "v7__ids": [2]}), {"ids": "v7__ids"}).to_pydict()
        {'v7__ids': [2], 'ids': [2]}
    """
    others = [name for name in rows.column_names if name not in names]
    return pa.table({name: rows.column(names.get(name, name)) for name in [*others, *names]}) if names else rows


def read_outcomes(worker: Worker, rows: pa.Table, fragment: Fragment) -> tuple[Floats, Floats | None]:
    """Returns labels and weights of rows, float64 [N] each."""
    labels, weights = worker.labels(rows, f"{fragment.day}"), worker.weights(rows, f"{fragment.day}")
    return labels.astype("float64"), None if weights is None else weights.astype("float64")


def score_portion(comparison: Comparison, fragments: Sequence[Fragment]) -> PortionSums:
    """Scores some fragments in a process of its own."""
    torch.set_num_threads(max((os.cpu_count() or 1) // comparison.evaluation.workers, 1))
    return PortionScorer(comparison).score(fragments, comparison.groups)
