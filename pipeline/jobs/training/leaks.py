"""Looks for features that tell the label by themselves, in a sample of the evaluation rows."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.data.alone import Alone, look_at_lists, look_at_numbers
from pipeline.inference.model import plan_of
from pipeline.jobs.evaluation.scorers import read_outcomes, rename_columns
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from pipeline.transforms.column import concatenate
from storage.layout.columns import spread
from storage.warehouse import Warehouse

ROWS = 16_384
"""Approximate number of rows to look at, spread over those of the fragments."""
MOST_FRAGMENTS = 64
"""Most fragments to read, spread over all."""


def find_leaks(warehouse: Warehouse, spec: DataSpec, model: Path, names: Mapping[str, str]) -> dict[str, Alone]:
    """Returns the features that leak, the clearest first.

    Args:
        spec: The evaluation rows.
        model: Folder of the packed model.
        names: Column of the model -> its name in the rows, where that is another.
    """
    plan, worker = plan_of(model), Worker(spec, warehouse)
    fragments = spread(worker.fragments(), MOST_FRAGMENTS)
    parts, labels = [], []
    for fragment in fragments:
        rows = worker.read_selected(fragment)
        rows = rows.take(np.arange(0, rows.num_rows, -(-rows.num_rows * len(fragments) // ROWS) or 1))
        parts.append(plan.apply(rename_columns(rows, names)))
        labels.append(read_outcomes(worker, rows, fragment)[0])
    if not parts:
        return {}
    y, dense = np.concatenate(labels), np.concatenate([part.dense for part in parts])
    found = {name: look_at_numbers(dense[:, at].astype(np.float64), y) for at, name in enumerate(plan.dense)}
    ids = [plan.ids(part.sparse) for part in parts]
    for at, feature in enumerate(plan.sparse):
        column = concatenate([part[at] for part in ids])
        assert column.offsets is not None
        found[feature.name] = look_at_lists(column.offsets, column.values, y)
    leaking = {name: alone for name, alone in found.items() if alone.leaks}
    return dict(sorted(leaking.items(), key=lambda item: -item[1].auc))


def describe_leaks(found: Mapping[str, Alone]) -> str:
    """Names the features, at most three of them."""
    listed = "; ".join(f"'{name}': {alone.words}" for name, alone in list(found.items())[:3])
    return listed + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
