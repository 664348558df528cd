"""Work of a step, counted from the model and its batches: operations, bytes, lookups, memory.

All counts are of one step of the global batch, over all ranks. Formula letters: B rows, D dense columns, F vectors of a
row (the dense one first), E width, P pairs, W ranks, n x m a matrix.

Source:
    Naumov et al. 2019, arXiv:1906.00091, section 2 (the parts of the model); Acun et al. 2021, arXiv:2011.05497,
    section III (lookups and table bytes next to MLP operations); Williams, Waterman, Patterson 2009, "Roofline"
    (operations and bytes against the ceilings of a machine).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from models.config import DLRMConfig, SparseFeature
from pipeline.data.batch import Batch
from pipeline.study.measure.results import Load
from pipeline.training.config import ROW_SHARDING, TrainConfig

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
ID_BYTES, LENGTH_BYTES = 8, 4
MOMENTS = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}
"""Numbers that a dense optimizer keeps per parameter."""


class TableLoad(NamedTuple):
    """A table and its lookups in a step."""

    rows: int
    lookups_per_row: float
    """Ids per row of the batch, over all features of the table."""
    distinct_rows: float
    """Distinct rows of the table in a global batch."""
    features: int = 1
    kind: str = "table_wise"
    """Sharding type."""


class Layer(NamedTuple):
    """A matrix that multiplies all rows."""

    inputs: int
    outputs: int
    learns_inputs: bool = True
    """Whether its inputs need a gradient. The dense columns do not."""
    bias: bool = True
    results: int = 2
    """Number of output-sized vectors it makes, including those of ReLU or the rest of a cross layer."""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.inputs * self.outputs + self.outputs * self.bias


def count_batch_load(
    model: DLRMConfig,
    dense_features: int,
    bags: Sequence[SparseFeature],
    batches: Sequence[Batch],
    training: TrainConfig,
    kinds: Mapping[str, str] | None = None,
) -> Load:
    """Counts the mean load of these batches.

    Args:
        batches: Global batches or shares of one rank. Shares are combined until they have `batch_rows` rows.
        kinds: Table -> sharding type. table_wise by default.
    """
    uses = count_table_loads(bags, batches, training.batch_rows, kinds or {})
    return count_load(model, dense_features, list(uses.values()), training)


def count_table_loads(
    bags: Sequence[SparseFeature], batches: Sequence[Batch], batch_rows: int, kinds: Mapping[str, str]
) -> dict[str, TableLoad]:
    """Counts the lookups of these batches in each table."""
    together = max(round(batch_rows / max(len(batches[0].labels), 1)), 1)
    steps = [batches[i : i + together] for i in range(0, max(len(batches) // together, 1) * together, together)]
    rows = sum(len(batch.labels) for step in steps for batch in step)
    members: dict[str, list[SparseFeature]] = {}
    for bag in bags:
        members.setdefault(bag.table, []).append(bag)
    ids = [[{name: one.values().numpy() for name, one in batch.sparse.to_dict().items()} for batch in s] for s in steps]
    uses = {}
    for table, features in members.items():
        looked_up = [np.concatenate([batch[bag.name] for batch in step for bag in features]) for step in ids]
        uses[table] = TableLoad(
            rows=features[0].rows,
            lookups_per_row=sum(map(len, looked_up)) / max(rows, 1),
            distinct_rows=float(np.mean([len(np.unique(one)) for one in looked_up])),
            features=len(features),
            kind=kinds.get(table, "table_wise"),
        )
    return uses


def count_load(model: DLRMConfig, dense_features: int, uses: Sequence[TableLoad], training: TrainConfig) -> Load:
    """Counts the load of a model from the lookups in its tables."""
    rows, width = training.batch_rows, model.embedding_width
    features = sum(use.features for use in uses)
    vectors = features + (1 if dense_features else 0)
    layers = list_layers(model, dense_features, vectors)
    parameters = sum(layer.parameters for layer in layers)
    lookups = rows * sum(use.lookups_per_row for use in uses)
    distinct = sum(use.distinct_rows for use in uses)
    row_bytes, state_bytes = count_row_bytes(width, training.table_precision, training.table_optimizer)
    activations = count_activation_bytes(layers, vectors * width, training)
    return Load(
        rows=rows,
        mlp_flop=sum((6 if one.learns_inputs else 4) * rows * one.inputs * one.outputs for one in layers),
        interaction_flop=4 * rows * vectors**2 * width if model.interaction == "dot" else 0,
        lookups=lookups,
        distinct_rows=distinct,
        embedding_bytes=row_bytes * lookups + 2 * (row_bytes + state_bytes) * distinct,
        dense_bytes=count_parameter_bytes(parameters, training) + activations,
        communication_bytes=count_communication_bytes(uses, parameters, width, training),
        dense_parameters=parameters,
        sparse_features=features,
        layers=len(layers),
        sample_bytes=4 * (dense_features + 1) + LENGTH_BYTES * features + ID_BYTES * lookups / rows,
        embedding_width=width,
        activation_bytes=activations,
    )


def list_layers(model: DLRMConfig, dense_features: int, vectors: int) -> list[Layer]:
    """Lists the linear layers and the matrices of cross layers, first to last.

    Args:
        vectors: F.
    Example:
        >>> [layer[:2] for layer in list_layers(DLRMConfig(embedding_width=4, bottom_mlp=(8,), top_mlp=(16,)), 3, 3)]
        [(3, 8), (8, 4), (7, 16), (16, 1)]
    """
    width = model.embedding_width
    bottom = [dense_features, *model.bottom_mlp, width] if dense_features else []
    side_by_side = vectors * width
    cross: list[Layer] = []
    if model.interaction == "dcn":
        rank = model.cross_rank
        thin = [] if rank is None else [Layer(side_by_side, rank, bias=False, results=1)]
        cross = [*thin, Layer(rank or side_by_side, side_by_side, results=4)] * model.cross_layers
    out = width + vectors * (vectors - 1) // 2 if model.interaction == "dot" else side_by_side
    return [
        *(Layer(a, b, number > 0) for number, (a, b) in enumerate(pairwise(bottom))),
        *cross,
        *(Layer(a, b) for a, b in pairwise([out, *model.top_mlp, 1])),
    ]


def count_row_bytes(width: int, precision: str, optimizer: str) -> tuple[int, int]:
    """Counts the bytes of a table row and of its optimizer state. The state is always float32.

    Example:
        >>> count_row_bytes(16, "fp32", "rowwise_adagrad"), count_row_bytes(16, "fp16", "adam")
        ((64, 4), (32, 128))
    """
    state = {"rowwise_adagrad": 4, "adagrad": 4 * width, "adam": 8 * width, "sgd": 0}
    return BYTES[precision] * width, state[optimizer]


def count_parameter_bytes(parameters: int, training: TrainConfig) -> float:
    """Counts the memory traffic of dense parameters on all ranks.

    Parameters are read forward and backward, and their gradients are written. The update reads gradients, and reads and
    writes parameters and moments. That is 6 + 2 moments numbers per parameter.
    """
    return BYTES["fp32"] * (6.0 + 2 * MOMENTS[training.dense_optimizer]) * parameters * training.world_size


def count_activation_bytes(layers: Sequence[Layer], side_by_side: int, training: TrainConfig) -> float:
    """Counts the memory traffic of activations.

    The input of the first layer, the outputs of each layer and the vectors of the interaction are written and read
    forward and read again backward. Their gradients are written and read. That is 5 numbers each.
    """
    of_a_row = side_by_side + layers[0].inputs + sum(layer.results * layer.outputs for layer in layers)
    return 5.0 * BYTES[training.dense_precision] * training.batch_rows * of_a_row


def count_communication_bytes(uses: Sequence[TableLoad], parameters: int, width: int, training: TrainConfig) -> float:
    """Counts the bytes that ranks send to one another.

    Ids and lengths go to the ranks that hold the rows: (W - 1) / W of them. For whole tables, vectors come back and
    gradients go out: (W - 1) / W each. For tables split by rows, each rank has a part of every vector: a reduce-scatter
    forward and an all-gather backward, W - 1 times all vectors. Gradients of replicated tables and of the dense part
    take a ring all-reduce, 2 (W - 1) times their size.

    Source:
        Mudigere et al. 2022, arXiv:2104.05158, section 3 (sharding types); Thakur, Rabenseifner, Gropp 2005 (volume
        of the collectives).
    """
    ranks, rows = training.world_size, training.batch_rows
    if ranks == 1 or training.sync != "synchronous":
        return 0.0
    sent = 2.0 * (ranks - 1) * BYTES["fp32"] * parameters
    numbers = BYTES[training.vector_communication] + BYTES[training.gradient_communication]
    for use in uses:
        if use.kind == "data_parallel":
            sent += 2.0 * (ranks - 1) * BYTES[training.table_precision] * width * use.rows
            continue
        cut = use.kind in ROW_SHARDING
        sent += ID_BYTES * rows * use.lookups_per_row * (ranks - 1) / ranks
        every = ranks - 1 if cut else (ranks - 1) / ranks
        sent += (LENGTH_BYTES + numbers * width) * rows * use.features * every
    return sent
