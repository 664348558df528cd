"""Scores the candidates of one user. What depends on the user alone is transformed and looked up once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from pipeline.errors import InputError
from pipeline.inference.invocations import of_records
from pipeline.inference.model import BATCH_ROWS, LoadedModel, check_finite
from pipeline.inference.request import table_of
from pipeline.transforms.plan.plan import Plan

REMEDY = 'Send {"user": {column: value}, "candidates": [{column: value}, ...]}.'
MOST_SPLITS = 64


class FeatureSubset(NamedTuple):
    """Some features of a model, with their positions among all of them."""

    plan: Plan
    dense: list[int]
    sparse: list[int]
    columns: list[str]
    """Raw columns that they are made of."""


class Ranking(NamedTuple):
    """Probabilities of the candidates, in their order, and the rows that were scored."""

    probabilities: npt.NDArray[np.float64]
    user: pa.Table
    """One row, or as many as there are candidates."""
    candidates: pa.Table

    @property
    def rows(self) -> pa.Table:
        """A raw row for each candidate."""
        return _beside(self.candidates, self.user)


class CandidateScorer:
    """Scores the candidates of a user with one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.splits: dict[frozenset[str], tuple[FeatureSubset, FeatureSubset]] = {}
        """By the user's columns. Callers of one server hardly differ in them."""

    def rank(self, user: Any, candidates: Any) -> Ranking:
        """Scores a user's candidates.

        Args:
            user: Column -> value.
            candidates: Rows without the user's columns, or a list per column.
        Raises:
            InputError: If a column is missing or given twice, or a value is of the wrong kind. Row numbers are those of
                the candidates, and 0 for the user.
        """
        if not isinstance(user, Mapping):
            raise InputError("user", "columns and their values", f"{user!r:.60}", REMEDY)
        if candidates == []:
            return Ranking(np.empty(0), pa.table({}), pa.table({}))
        sent = candidates if isinstance(candidates, Mapping) else of_records(candidates)
        if sent is None:
            raise InputError("candidates", "rows with at least one column", f"{candidates!r:.60}", REMEDY)
        twice = sorted(user.keys() & sent.keys() & self.loaded.columns.keys())
        if twice:
            remedy = "Leave each out of one of them."
            raise InputError("input", "a column of the user or of candidates", f"{', '.join(twice)} in both", remedy)
        kinds, defaults = self.loaded.columns, self.loaded.defaults
        absent = [name for name in kinds if name not in user and name not in sent and name not in defaults]
        if absent:
            raise InputError("input", f"columns {', '.join(kinds)}", f"none named {', '.join(absent)}", "Add them.")
        own = [name for name in kinds if name not in sent]
        if not user.keys() & {*own} or not sent.keys() & kinds.keys():  # one side has no column of the model
            if not sent.keys() & kinds.keys():
                remedy = "Give candidates a column that the model reads."
                raise InputError("candidates", f"columns among {', '.join(kinds)}", "none of them", remedy)
            rows = self.loaded.table_of(sent)
            return Ranking(check_finite(self.loaded.score(rows)), rows.select([]), rows)
        one = table_of(
            {name: [user[name]] for name in own if name in user}, {name: kinds[name] for name in own}, defaults
        )
        rows = table_of(sent, {name: kind for name, kind in kinds.items() if name in sent}, defaults)
        return Ranking(check_finite(self._score(one, rows)), one, rows)

    def _score(self, user: pa.Table, rows: pa.Table) -> npt.NDArray[np.float64]:
        own = frozenset(user.column_names)
        if own not in self.splits:
            if len(self.splits) >= MOST_SPLITS:
                self.splits.clear()
            self.splits[own] = self._split(own)
        user_side, candidate_side = self.splits[own]
        dense_1D, vectors_1FE = self.loaded.pool(user_side.plan, user)
        rows = _beside(rows, user.select([name for name in candidate_side.columns if name in user.column_names]))
        return np.concatenate(
            [
                self._score_batch(user_side, dense_1D, vectors_1FE, candidate_side, rows.slice(start, BATCH_ROWS))
                for start in range(0, rows.num_rows, BATCH_ROWS)
            ]
        )

    def _score_batch(
        self,
        user_side: FeatureSubset,
        dense_1D: torch.Tensor,
        vectors_1FE: torch.Tensor,
        candidate_side: FeatureSubset,
        rows: pa.Table,
    ) -> npt.NDArray[np.float64]:
        dense_BD, vectors_BFE = self.loaded.pool(candidate_side.plan, rows)
        plan = self.loaded.plan
        dense = torch.empty(rows.num_rows, len(plan.dense))
        vectors = torch.empty(rows.num_rows, len(plan.sparse), self.loaded.width)
        dense[:, user_side.dense], dense[:, candidate_side.dense] = dense_1D, dense_BD
        vectors[:, user_side.sparse], vectors[:, candidate_side.sparse] = vectors_1FE, vectors_BFE
        return self.loaded.score_parts(dense, vectors)

    def _split(self, own: frozenset[str]) -> tuple[FeatureSubset, FeatureSubset]:
        """Returns the features made of the user's columns alone, and all other features."""
        plan = self.loaded.plan
        known = own | {*plan.absent}
        alone = {name for name in plan.features if plan.columns_of(name) <= known}
        return self._subset(alone), self._subset({*plan.features} - alone)

    def _subset(self, names: set[str]) -> FeatureSubset:
        plan = self.loaded.plan
        dense = [place for place, name in enumerate(plan.dense) if name in names]
        sparse = [place for place, feature in enumerate(plan.sparse) if feature.name in names]
        part = plan.model_copy(
            update={
                "dense": tuple(plan.dense[place] for place in dense),
                "sparse": tuple(plan.sparse[place] for place in sparse),
            }
        )
        read = {column for name in names for column in plan.columns_of(name)}
        return FeatureSubset(part, dense, sparse, [name for name in plan.columns if name in read])


def _beside(rows: pa.Table, user: pa.Table) -> pa.Table:
    """Returns the rows with the user's columns, which repeat its row."""
    first: Sequence[int] = [0] * rows.num_rows if user.num_columns else []
    for name in user.column_names:
        rows = rows.append_column(user.schema.field(name), user.column(name).take(pa.array(first, pa.int64())))
    return rows
