"""Tables of each kernel with drawn numbers, as both tests of kernels train them."""

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation, PoolingMode

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
RATE, EPS = 0.1, 1e-8


def make_bags(
    tables: Sequence[tuple[int, int]], owners: Sequence[int], kernel: type, optimizer: str, mean: bool,
    threads: int = 1, **settings: Any,
) -> Any:  # fmt: skip
    """Makes tables of (rows, width), of which each feature reads that of its owner."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bags = kernel(
            [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, width in tables],
            feature_table_map=list(owners), optimizer=OPTIMIZERS[optimizer], learning_rate=RATE, eps=EPS, device="cpu",
            pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM, **settings,
        )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    generator = torch.Generator().manual_seed(7)
    for table in bags.split_embedding_weights():
        table.copy_(torch.rand(table.shape, generator=generator) - 0.5)
    return bags
