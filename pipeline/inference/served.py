"""A version as a server holds it: its tables mapped from a file that all processes share."""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from pipeline.inference.candidate_scorer import CandidateScorer, Ranking
from pipeline.inference.invocations import InvocationReader, of_records, plain_columns
from pipeline.inference.model import LoadedModel, check_finite
from pipeline.inference.request import TYPES, table_of

WARM_ROWS = (1, 1_000)


class ServedModel:
    """A model that reads requests.

    Nothing in it refers back to it, so that a version that no longer serves is freed at once.

    Args:
        loaded: The model.
        keep: Further columns of requests, with their types, to be among the rows. They never make a request fail.
    """

    def __init__(self, loaded: LoadedModel, keep: Mapping[str, str] = MappingProxyType({})) -> None:
        self.loaded, self.keep = loaded, {name: keep[name] for name in keep if name not in loaded.columns}
        self.reading = copy.copy(loaded)
        self.reading.columns = loaded.columns | self.keep
        self.reading.defaults = loaded.defaults | dict.fromkeys(self.keep)
        self.invocations, self.candidates = InvocationReader(self.reading), CandidateScorer(loaded)

    @property
    def columns(self) -> Mapping[str, str]:
        """The raw columns it reads, with their types."""
        return self.loaded.columns

    def read_invocation(self, body: bytes) -> pa.Table:
        """Returns the rows of a JSON body in MLflow's schema.

        Raises:
            InputError: As the pyfunc would.
        """
        return self.invocations.read(body)

    def table_of(self, rows: Any) -> pa.Table:
        """Converts an Arrow table, or a list per column.

        Raises:
            InputError: If a column is missing, or a value is of the wrong kind.
        """
        return self.reading.table_of(rows)

    def score_rows(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        """Returns the probabilities of converted rows, float64 [N].

        Raises:
            InputError: If one is not finite.
        """
        return check_finite(self.loaded.score(rows))

    def rank(self, user: Any, candidates: Any) -> Ranking:
        """Scores a user's candidates.

        Raises:
            InputError: If a column is missing or given twice, or a value is of the wrong kind.
        """
        ranking = self.candidates.rank(user, candidates)
        return self._keep_ranked(ranking, user, candidates) if self.keep else ranking

    def _keep_ranked(self, ranking: Ranking, user: Mapping[str, Any], candidates: Any) -> Ranking:
        """Adds the columns to keep to the candidates."""
        rows = ranking.candidates
        sent = candidates if isinstance(candidates, Mapping) else of_records(candidates) or {}
        for name, kind in self.keep.items():
            values = sent.get(name, [user.get(name)] * rows.num_rows)
            column = {name: values if len(values) == rows.num_rows else [None] * rows.num_rows}
            rows = rows.append_column(name, table_of(column, {name: kind}, {name: None}).column(name))
        return ranking._replace(candidates=rows)

    def warm(self, example: Path | None = None) -> None:
        """Compiles and loads what the first plain requests would wait for.

        Args:
            example: File with a body. None, or no such file: only rows without any value.
        """
        samples = [pa.table({name: pa.nulls(1, TYPES[kind]) for name, kind in self.columns.items()})]
        if example is not None and example.is_file() and (sent := plain_columns(example.read_bytes(), self.columns)):
            samples.append(self.table_of(sent))
        for rows in samples:
            for count in WARM_ROWS:
                self.score_rows(pa.concat_tables([rows] * count).slice(0, count))

    def warm_rest(self) -> None:
        """Loads what reads all other bodies: MLflow, which takes seconds. Any thread may call it."""
        body = {"dataframe_split": {"columns": [*self.columns], "data": [[None] * len(self.columns)]}}
        self.invocations.read_through_mlflow(orjson.dumps(body))


def open_served(folder: Path, keep: Mapping[str, str] = MappingProxyType({})) -> ServedModel:
    """Loads a packed model to serve it.

    Args:
        keep: As in `ServedModel`.
    """
    return ServedModel(LoadedModel(folder), keep)
