"""The CPU kernel against a row-by-row reference in float64, FBGEMM, and itself with other thread counts."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed import batched_embedding_kernel

from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.tables import kernels
from pipeline.training.tables.bags import NumbaBags, require_fbgemm, set_update_number, use_table_kernel
from tests.pipeline.training.tables.drawn_bags import EPS, OPTIMIZERS, RATE, make_bags

TABLES = [(40, 84), (3, 12), (1, 4)]
"""Rows and widths. Columns of the first are summed by four registers, by one, and singly."""
OWNERS = [0, 0, 1, 2]
"""Two features share the first table."""
POOLINGS = [(False, False), (True, False), (False, True)]
"""Sums, means, and sums with a weight for each id."""
WIDTH = sum(TABLES[owner][1] for owner in OWNERS)
BAGS, STEPS = 24, 5


make = partial(make_bags, TABLES, OWNERS)


def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns (ids, offsets, gradient) with empty bags, repeated ids, and one id in every bag of the last feature."""
    random = np.random.default_rng(3)
    made = []
    for _ in range(STEPS):
        lengths = random.integers(0, 6, len(OWNERS) * BAGS)
        ids = [random.integers(0, TABLES[OWNERS[i // BAGS]][0], n) for i, n in enumerate(lengths)]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        gradient = random.normal(size=(BAGS, sum(TABLES[t][1] for t in OWNERS))).astype(np.float32)
        made.append((torch.from_numpy(np.concatenate(ids)), torch.from_numpy(offsets), torch.from_numpy(gradient)))
    return made


def id_weights(step: int, ids: torch.Tensor) -> torch.Tensor:
    """Weights of a step's ids, some of them 0 or negative."""
    random = np.random.default_rng([4, step])
    return torch.from_numpy(np.round(random.normal(size=len(ids)), 1).astype(np.float32))


def train(bags: Any, weighted: bool = False) -> list[torch.Tensor]:
    """Returns the pooled vectors of every step."""
    pooled = []
    for step, (ids, offsets, gradient) in enumerate(batches()):
        set_update_number(bags, step + 1)
        out = bags(ids, offsets, id_weights(step, ids)) if weighted else bags(ids, offsets)
        pooled.append(out.detach().clone())
        out.backward(gradient)
    return pooled


def reference(
    optimizer: str, mean: bool, decay: float, limit: float, weighted: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the pooled vectors of every step and the final tables, in float64, computed row by row."""
    tables = [table.double().numpy().copy() for table in make(NumbaBags, "sgd", False).split_embedding_weights()]
    first = [np.zeros_like(table) for table in tables]
    second = [np.zeros_like(table) for table in tables]
    columns = np.cumsum([0] + [TABLES[t][1] for t in OWNERS])
    seen = []
    for step, (ids, offsets, gradient) in enumerate(batches(), 1):
        out = np.zeros(gradient.shape)
        rows: dict[tuple[int, int], np.ndarray] = {}
        weights = id_weights(step - 1, ids).double().tolist() if weighted else [1.0] * len(ids)
        for f, table in enumerate(OWNERS):
            for b in range(BAGS):
                bag = slice(offsets[f * BAGS + b], offsets[f * BAGS + b + 1])
                for row, weight in zip(ids[bag].tolist(), weights[bag], strict=True):
                    share = 1.0 / len(ids[bag]) if mean else 1.0
                    span = slice(columns[f], columns[f + 1])
                    out[b, span] += weight * share * tables[table][row]
                    part = np.clip(weight * share * gradient[b, span].double().numpy(), -limit, limit)
                    rows[table, row] = rows.get((table, row), 0.0) + part
        for (table, row), total in rows.items():
            w, m, v = tables[table][row], first[table][row], second[table][row]
            g = total + decay * w
            if optimizer == "sgd":
                w -= RATE * g
            elif optimizer == "rowwise_adagrad":
                m += (g**2).mean()
                w -= RATE * g / (np.sqrt(m) + EPS)
            elif optimizer == "adagrad":
                m += g**2
                w -= RATE * g / (np.sqrt(m) + EPS)
            else:
                m[:], v[:] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                w -= RATE * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + EPS)
        seen.append(out)
    return seen, tables


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("mean", "weighted"), POOLINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_the_reference(optimizer, mean, weighted, threads):
    bags = make(NumbaBags, optimizer, mean, threads)
    seen, tables = reference(optimizer, mean, 0.0, np.inf, weighted)
    for found, expected in zip(train(bags, weighted), seen, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for found, expected in zip(bags.split_embedding_weights(), tables, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_and_the_limit_of_gradients(optimizer, weighted):
    bags = make(NumbaBags, optimizer, not weighted, 2, weight_decay=0.3, gradient_clipping=True, max_gradient=0.2)
    train(bags, weighted)
    _, tables = reference(optimizer, not weighted, float(np.float32(0.3)), float(np.float32(0.2)), weighted)
    for found, expected in zip(bags.split_embedding_weights(), tables, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("mean", "weighted"), POOLINGS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fbgemm_gives_the_same_weights_and_state(optimizer, mean, weighted):
    ours, theirs = make(NumbaBags, optimizer, mean), make(SplitTableBatchedEmbeddingBagsCodegen, optimizer, mean)
    for found, expected in zip(train(ours, weighted), train(theirs, weighted), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for found, expected in zip(ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for found, expected in zip(ours.get_optimizer_state(), theirs.get_optimizer_state(), strict=True):
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("mean", "weighted"), POOLINGS)
def test_a_column_has_the_same_bits_in_a_table_of_any_width(mean, weighted):
    """Column-wise sharding cuts tables. Some processors (AVX-512) took the sums of narrow ones in another order."""
    random = np.random.default_rng(6)
    weights = (random.random((50, 80)) - 0.5).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 12, 200))])
    ids, of_ids = random.integers(0, 50, offsets[-1]), random.random(offsets[-1], np.float32)

    def pooled(part: np.ndarray) -> np.ndarray:
        out = np.empty((200, part.shape[1]), np.float32)
        features = np.array([[0, 50, part.shape[1], 0]])
        if weighted:
            kernels.pool_weighted(part.reshape(-1), features, ids, offsets, of_ids, out, 0, 200)
        else:
            kernels.pool(part.reshape(-1), features, mean, ids, offsets, out, 0, 200)
        return out

    whole = pooled(weights)
    for width in (1, 4, 5, 8, 16, 20, 40):
        parts = [pooled(weights[:, first : first + width].copy()) for first in range(0, 80, width)]
        assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes(), width


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_do_not_depend_on_threads(optimizer, weighted):
    runs = [make(NumbaBags, optimizer, not weighted, threads) for threads in (1, 1, 2, 5)]
    pooled = [train(bags, weighted) for bags in runs]
    for bags, seen in zip(runs, pooled, strict=True):
        assert all(a.equal(b) for a, b in zip(seen, pooled[0], strict=True))
        assert bags.weights_host.equal(runs[0].weights_host)


@pytest.mark.parametrize(("mean", "weighted"), POOLINGS)
def test_more_rows_than_fit_at_once(mean, weighted, monkeypatch):
    """They are updated in several rounds with the same bits and do not affect the next step."""
    roomy = make(NumbaBags, "rowwise_adagrad", mean)
    monkeypatch.setattr("pipeline.training.tables.bags.SUMS_BYTES", 7 * 84 * 4)
    narrow = make(NumbaBags, "rowwise_adagrad", mean)
    assert len(narrow.rows_seen[0]) == 7
    assert all(a.equal(b) for a, b in zip(train(roomy, weighted), train(narrow, weighted), strict=True))
    assert narrow.weights_host.equal(roomy.weights_host)
    assert (narrow.slots == -1).all()


def test_a_gradient_is_read_where_it_lies():
    """As a part of a wider array, or with strided columns."""
    plain, part, apart = (make(NumbaBags, "sgd", False) for _ in range(3))
    for ids, offsets, gradient in batches():
        plain(ids, offsets).backward(gradient)
        part(ids, offsets).backward(torch.nn.functional.pad(gradient, (3, 2))[:, 3:-2])
        apart(ids, offsets).backward(gradient.T.contiguous().T)
    assert part.weights_host.equal(plain.weights_host)
    assert apart.weights_host.equal(plain.weights_host)


def test_parts_of_a_large_table_are_all_updated():
    """One table has nearly all lookups, so several threads share its rows."""
    bags = make(NumbaBags, "sgd", False, 4)
    ids = torch.arange(40).repeat(50)
    counts = torch.zeros(len(OWNERS) * BAGS, dtype=torch.int64)
    counts[0] = len(ids)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tasks = np.concatenate(bags._share_out(offsets.numpy()))
    assert sorted(part for table, part, mask in tasks.tolist() if table == 0) == [0, 1, 2, 3]
    before = bags.split_embedding_weights()[0].clone()
    bags(ids, offsets).backward(torch.ones(BAGS, WIDTH))
    torch.testing.assert_close(bags.split_embedding_weights()[0], before - RATE * 50, atol=1e-4, rtol=0)


def test_evaluation_updates_nothing():
    bags = make(NumbaBags, "adam", False)
    before = bags.weights_host.clone()
    with torch.no_grad():
        assert not bags(*batches()[0][:2]).requires_grad
    assert bags.weights_host.equal(before)


def test_an_empty_batch():
    bags = make(NumbaBags, "rowwise_adagrad", True, 2)
    assert bags(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).shape == (0, WIDTH)
    none = torch.zeros(len(OWNERS) * 2 + 1, dtype=torch.int64)
    out = bags(torch.empty(0, dtype=torch.int64), none)
    assert out.equal(torch.zeros(2, WIDTH))
    before = bags.weights_host.clone()
    out.backward(torch.ones(2, WIDTH))
    assert bags.weights_host.equal(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("wrong", [-1, 40, 2**62])
def test_ids_outside_their_table_are_refused(wrong, threads):
    """Each is counted, also in a feature's last bag and that of another thread."""
    ids, offsets, _ = batches()[0]
    for feature in range(len(OWNERS)):
        start, stop = offsets[feature * BAGS], offsets[(feature + 1) * BAGS]
        ids[start] = ids[(start + stop) // 2] = ids[stop - 1] = wrong
    with pytest.raises(IndexError, match=f"{3 * len(OWNERS)} ids outside the tables"):
        make(NumbaBags, "sgd", False, threads)(ids, offsets)


@pytest.mark.parametrize("empty", [[0], [3], [0, 1, 3], [1, 2]])
def test_features_without_ids(empty):
    """Their vectors are zeros. Those of the others are the same as in a batch where all have ids."""
    bags = make(NumbaBags, "sgd", False, 2)
    ids, offsets, _ = batches()[0]
    counts = offsets.diff().view(len(OWNERS), BAGS)
    kept = torch.tensor([feature not in empty for feature in range(len(OWNERS))])
    fewer = (counts * kept[:, None]).flatten()
    chosen = ids[kept[:, None].expand_as(counts).flatten().repeat_interleave(counts.flatten())]
    columns = kept.repeat_interleave(torch.tensor([TABLES[owner][1] for owner in OWNERS]))
    out = bags(chosen, torch.cat([offsets[:1], fewer.cumsum(0)]))
    assert out.equal(bags(ids, offsets) * columns)


def test_unsupported_uses_are_refused():
    with pytest.raises(NotImplementedError, match="fp16"):
        make(NumbaBags, "sgd", False, weights_precision=SparseType.FP16)
    ids, offsets, _ = batches()[0]
    with pytest.raises(NotImplementedError, match="weights with means"):
        make(NumbaBags, "sgd", True)(ids, offsets, torch.ones(len(ids)))


def test_fbgemm_keeps_its_own_class() -> None:
    with use_table_kernel(TrainConfig(embedding_kernel="fbgemm"), torch.device("cpu"), NumbaBags):
        assert batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen is SplitTableBatchedEmbeddingBagsCodegen


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"table_optimizer": "adam"},
            "expected table_optimizer rowwise_adagrad, adagrad or sgd, got adam. Set embedding_kernel: auto, with fp32 tables.",
        ),
        (
            {"table_weight_decay": 0.1},
            "expected no table_weight_decay, got 0.1. Set embedding_kernel: auto, with fp32 tables.",
        ),
    ],
)
def test_settings_that_fbgemm_ignores_on_cpu_are_refused(settings, sentence):
    config = TrainConfig(embedding_kernel="fbgemm", **settings)
    with pytest.raises(ConfigError) as caught:
        require_fbgemm(config, "cpu")
    assert str(caught.value) == f"training.embedding_kernel 'fbgemm' on CPU: {sentence}"


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fbgemm_on_cuda_follows_the_same_rules(optimizer: str) -> None:
    """FBGEMM counts forward passes. Validation has no update and must not move Adam's correction."""
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows, width in TABLES],
        feature_table_map=OWNERS, optimizer=OPTIMIZERS[optimizer], learning_rate=RATE, eps=EPS, device="cuda",
    )  # fmt: skip
    for table, start in zip(
        bags.split_embedding_weights(), make(NumbaBags, "sgd", False).split_embedding_weights(), strict=True
    ):
        table.copy_(start)
    for step, (ids, offsets, gradient) in enumerate(batches()):
        set_update_number(bags, step + 1)
        bags(ids.cuda(), offsets.cuda()).backward(gradient.cuda())
        bags(ids.cuda(), offsets.cuda())
    _, expected = reference(optimizer, False, 0.0, np.inf)
    for table, value in zip(bags.split_embedding_weights(), expected, strict=True):
        np.testing.assert_allclose(table.cpu().numpy(), value, atol=1e-4)
