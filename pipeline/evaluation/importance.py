"""Feature importance, and facts about the values of features: coverage, length, hash collisions."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from pipeline.evaluation.gate import ne_difference
from pipeline.evaluation.metrics import Floats, losses
from pipeline.evaluation.record import FeatureImportance
from pipeline.evaluation.sums import PairedSums
from pipeline.transforms.column import Column
from pipeline.transforms.plan.plan import Plan
from pipeline.transforms.plan.schedule import Schedule


class ImportanceEstimator:
    """Estimates the importance of all features on a sample of rows.

    The values of one feature at a time are permuted among the rows of a batch: it keeps its distribution and loses its
    meaning. A pooled vector is permuted whole: the tables are looked up once, not once per feature.

    Args:
        score: Probabilities, float64 [B], of dense numbers [B, D] and pooled vectors [B, F, E].
        seed: Of the permutations.
        level: Chance that an interval misses the true loss.
        least_loss: Smallest NE loss that matters.
    Source:
        Breiman 2001, "Random forests", section 10; Fisher, Rudin and Dominici 2019, arXiv:1801.01489.
    """

    def __init__(
        self,
        plan: Plan,
        score: Callable[[torch.Tensor, torch.Tensor], Floats],
        seed: int,
        level: float,
        least_loss: float,
    ) -> None:
        self.plan, self.score, self.seed, self.level, self.least_loss = plan, score, seed, level, least_loss
        self.names = plan.features
        self.pairs = PairedSums(len(self.names))
        self.batches = self.rows = 0
        makers = {op.output: op for op in plan.ops}
        self.ends = {name: plan.direct.get(name, name) for name in self.names}
        self.starts: dict[str, str] = {}
        self.hashed: dict[str, tuple[str, str]] = {}
        for name, key in self.ends.items():
            while (op := makers.get(key)) is not None and (len(op.inputs) == 1 or op.kind == "weigh"):
                if op.kind == "sigrid_hash" and name not in self.hashed:
                    self.hashed[name] = (op.inputs[0], op.output)
                key = op.inputs[0]
            self.starts[name] = key
        wanted = [*self.ends.values(), *self.starts.values(), *(key for pair in self.hashed.values() for key in pair)]
        self.schedule = Schedule(plan.ops, dict.fromkeys(wanted))
        self.present: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.distinct: dict[str, list[list[np.ndarray]]] = {name: [[], []] for name in self.hashed}

    def add(
        self,
        rows: pa.Table,
        labels: Floats,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        weights: Floats | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            rows: The raw rows that `dense` and `vectors` were made from.
            weights: float64 [N], where rows have weights.
        """
        self._count_values(rows)
        before = losses(labels, self.score(dense, vectors))
        none = np.zeros(len(labels), np.int64)
        for number in range(len(self.names)):
            order = torch.from_numpy(np.random.default_rng([self.seed, self.batches, number]).permutation(len(labels)))
            own = number - len(self.plan.dense)
            changed = dense.clone() if own < 0 else vectors.clone()
            column = number if own < 0 else own
            changed[:, column] = changed[order, column]
            after = self.score(changed, vectors) if own < 0 else self.score(dense, changed)
            self.pairs.add(labels, np.nan_to_num(losses(labels, after) - before), none, none + number, weights)
        self.batches += 1

    def estimate(self) -> list[FeatureImportance]:
        """Returns all features, the most important first."""
        found = [self._estimate(number, name) for number, name in enumerate(self.names)]
        return sorted(found, key=lambda feature: -(feature.ne_loss or 0.0))

    def _count_values(self, rows: pa.Table) -> None:
        columns = self.schedule.run(self.plan.with_absent_columns(rows), Counter(), Counter())
        self.rows += rows.num_rows
        for name in self.names:
            start, end = columns[self.starts[name]], columns[self.ends[name]]
            self.present[name] += _count_present(start)
            if start.offsets is not None:
                self.ids[name] += len(start.values)
                self.kept[name] += min(len(end.values), len(start.values))
            elif end.offsets is not None:  # ids that were made of numbers
                self.ids[name] += len(end.values)
                self.kept[name] += len(end.values)
        for name, keys in self.hashed.items():
            for seen, key in zip(self.distinct[name], keys, strict=True):
                seen.append(np.unique(columns[key].values))

    def _estimate(self, number: int, name: str) -> FeatureImportance:
        found = ne_difference(self.pairs, True, self.level, number)
        sparse = number >= len(self.plan.dense)
        ids = self.ids[name]
        collisions = None
        if name in self.distinct and self.batches:
            before, after = (len(np.unique(np.concatenate(seen))) for seen in self.distinct[name])
            collisions = 1.0 - after / before if before else 0.0
        return FeatureImportance(
            name=name,
            kind="sparse" if sparse else "dense",
            ne_loss=None if found is None else found.ne,
            low=None if found is None else found.low,
            high=None if found is None else found.high,
            coverage=self.present[name] / self.rows if self.rows else 0.0,
            mean_length=ids / self.rows if sparse and self.rows else None,
            truncated=1.0 - self.kept[name] / ids if sparse and ids else None,
            collisions=collisions,
            droppable=found is not None and found.high < self.least_loss,
        )


def _count_present(column: Column) -> int:
    """Counts rows with a value."""
    if column.offsets is None:
        return int(np.count_nonzero(~np.isnan(column.values)))
    return int(np.count_nonzero(np.diff(column.offsets)))
