"""What TorchRec gives under private names only, and where its sharded tables are made to work in another way.

TorchRec has no option for any of it. Methods are replaced in single modules, after TorchRec has built them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from storage.errors import importing_private, require_private

with importing_private("torchrec", "1.8."):
    from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ShardingOption
    from torchrec.distributed.types import Awaitable
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

require_private(
    "torchrec", "1.8.", {
        DistributedModelParallel: ["_env"],
        EmbeddingEnumerator: ["_constraints", "_filter_sharding_types"],
        EmbeddingShardingPlanner: ["_best_plan"],
        GroupedPooledEmbeddingsLookup: ["_emb_modules", "_feature_splits"],
        ShardedEmbeddingBagCollection: [
            "_embedding_bag_configs", "_embedding_dims", "_embedding_names", "_embedding_shardings",
            "_has_mean_pooling_callback", "_lookups", "_output_dists", "_pooling_type_to_rs_features",
        ],
    },
)  # fmt: skip


def ranks_of(model: DistributedModelParallel) -> ProcessGroup:
    """Returns the ranks that a model's tables are divided among."""
    return model._env.process_group


def options_of(planner: EmbeddingShardingPlanner) -> list[ShardingOption]:
    """Returns what a planner has chosen for each table, with the bytes and times that it expects."""
    return planner._best_plan or []


def mark_optimizer(table: nn.Parameter, optimizer: type) -> None:
    """Tells the planner which optimizer a table will have."""
    table._optimizer_classes = [optimizer]  # type: ignore[attr-defined]


def configs_of(tables: ShardedEmbeddingBagCollection) -> list[EmbeddingBagConfig]:
    """Returns the settings of all tables."""
    return tables._embedding_bag_configs


def lookups_of(tables: ShardedEmbeddingBagCollection) -> list[Any]:
    """Returns the modules with this rank's tables, one for each of TorchRec's shardings."""
    return list(tables._lookups)


def shardings_of(tables: ShardedEmbeddingBagCollection) -> list[Any]:
    """Returns what TorchRec knows of the tables of all ranks: one object for each way to shard them."""
    return list(tables._embedding_shardings)


def kernels_of(lookup: Any) -> tuple[list[Any], list[int]]:
    """Returns the modules of a lookup that each have some of its tables, and how many features each looks up."""
    return list(lookup._emb_modules), lookup._feature_splits


def divides_by_lengths(tables: ShardedEmbeddingBagCollection) -> bool:
    """Whether TorchRec divides vectors by the lengths of lists, since a row-wise table is pooled by its mean."""
    return bool(tables._has_mean_pooling_callback)


def look_up_locally(tables: ShardedEmbeddingBagCollection) -> None:
    """Replaces the forward pass of tables that are all on one rank.

    TorchRec's would send ids and vectors to this same rank, which takes longer than the lookup for small batches.
    """
    (sharding,), (lookup,) = tables._embedding_shardings, tables._lookups
    look_up = lookup._emb_modules[0] if len(lookup._emb_modules) == 1 else lookup  # the latter splits ids by kernel
    features, names, widths = sharding.feature_names(), tables._embedding_names, tables._embedding_dims

    def forward(sparse: KeyedJaggedTensor) -> KeyedTensor:
        given = sparse.keys()
        ids = sparse if given == features else sparse.permute([given.index(name) for name in features])
        return KeyedTensor(names, widths, look_up(ids))

    tables.forward = forward


def divide_lengths_once(tables: ShardedEmbeddingBagCollection, whole: set[str]) -> None:
    """Prevents a second division of mean-pooled vectors.

    If a row-wise table is pooled by its mean, TorchRec 1.8 divides the vectors of ALL features by their lengths, except
    those that it knows as sums of a row-wise table. Kernels of other sharding types have taken the mean already.

    Args:
        whole: Tables that are not divided by rows.
    """
    if not tables._has_mean_pooling_callback:
        return
    for config in tables._embedding_bag_configs:
        if config.name in whole:
            tables._pooling_type_to_rs_features[PoolingType.SUM.value].extend(config.feature_names)


def replace_exchange(
    tables: ShardedEmbeddingBagCollection,
    at: int,
    send: Callable[[KeyedJaggedTensor], Any],
    look_up: Callable[[Any], Tensor],
    receive: Callable[[Tensor, Any], Awaitable[Tensor]],
) -> None:
    """Replaces how the tables of one of TorchRec's shardings get their ids, look them up, and hand out the vectors."""
    tables._embedding_shardings[at].create_input_dist = lambda device=None: send
    tables._lookups[at].forward = look_up
    tables._output_dists[at] = receive


def reorder_vectors(tables: ShardedEmbeddingBagCollection, widths: Mapping[str, int]) -> None:
    """Tells TorchRec the features in the order of their vectors, with their widths."""
    tables._embedding_names[:], tables._embedding_dims[:] = widths.keys(), widths.values()
