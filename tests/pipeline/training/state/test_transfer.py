"""A grown model predicts as before until it is trained."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.training.state.transfer import FeatureState, transfer_state

ROWS = 7
BEFORE = FeatureState(
    dense=("a", "b"), bags=(SparseFeature("user", "user", 5, "sum"), SparseFeature("item", "things", 6, "mean"))
)
AFTER = FeatureState(
    dense=("new", "b", "a"),
    bags=(
        SparseFeature("fresh", "fresh", 3, "sum"), SparseFeature("item", "things", 9, "mean"), SparseFeature("other", "things", 9, "mean"),
        SparseFeature("user", "user", 5, "sum"),
    ),
)  # fmt: skip


def built(config: DLRMConfig, features: FeatureState, seed: int) -> DLRM:
    torch.manual_seed(seed)
    return DLRM(config, len(features.dense), features.bags).eval()


def rows(features: FeatureState, seed: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """The same values for the same features."""
    dense, keys, values, lengths = [], [], [], []
    for name in features.dense:
        dense.append(torch.randn(ROWS, generator=torch.Generator().manual_seed(seed + sum(map(ord, name)))))
    for bag in features.bags:
        random = torch.Generator().manual_seed(seed + sum(map(ord, bag.name)))
        counts = torch.randint(0, 4, (ROWS,), generator=random)
        keys.append(bag.name)
        lengths.append(counts)
        values.append(torch.randint(0, 3, (int(counts.sum()),), generator=random))
    return torch.stack(dense, 1), KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))


def state(model: DLRM, momentum: float) -> dict[str, torch.Tensor]:
    """State as in a checkpoint, with a moment for each number of a layer and each row of a table."""
    weights = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    moments = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("embeddings."):
            moments[f"tables/{name}/{name.split('.')[-2]}.momentum1"] = torch.full((len(tensor),), momentum)
        else:
            moments[f"dense/{name}/exp_avg"] = torch.full_like(tensor, momentum)
            moments[f"dense/{name}/step"] = torch.tensor(momentum)
    return weights | moments


@pytest.mark.parametrize(
    "kind", [{"interaction": "dot"}, {"interaction": "cat"}, {"interaction": "dcn"}, {"interaction": "dcn", "cross_rank": 2}, {"top_mlp": ()}]
)  # fmt: skip
def test_added_features_change_nothing_at_first(kind):
    config = DLRMConfig(**{"embedding_width": 4, "bottom_mlp": (5,), "top_mlp": (6,)} | kind)
    small, large = built(config, BEFORE, 1), built(config, AFTER, 2)
    made = transfer_state(config, state(small, 3.0), state(large, 0.0), (BEFORE, AFTER), {"a", "b", "user", "item"})
    assert (made.new_tables, made.larger_tables) == (("fresh",), ("things",))
    fresh = large.state_dict()
    large.load_state_dict({n.removeprefix("model/"): t for n, t in made.tensors.items() if n.startswith("model/")})
    (dense, sparse), (more_dense, more_sparse) = rows(BEFORE, 5), rows(AFTER, 5)
    torch.testing.assert_close(large(more_dense, more_sparse), small(dense, sparse))
    table = "embeddings.embedding_bags.things.weight"
    assert torch.equal(large.state_dict()[table][:6], small.state_dict()[table])
    assert torch.equal(large.state_dict()[table][6:], fresh[table][6:])
    assert made.tensors[f"tables/{table}/things.momentum1"].tolist() == [3.0] * 6 + [0.0] * 3
    moments = made.tensors["dense/bottom.0.weight/exp_avg"]
    assert moments[:, 1:].eq(3.0).all()
    assert moments[:, 0].eq(0.0).all()
    assert made.tensors["dense/bottom.0.weight/step"] == 3.0


def test_a_feature_with_another_meaning_starts_from_initial_weights():
    config = DLRMConfig(embedding_width=4, bottom_mlp=(5,), top_mlp=(6,))
    small, large = built(config, BEFORE, 1), built(config, BEFORE, 2)
    made = transfer_state(config, state(small, 3.0), state(large, 0.0), (BEFORE, BEFORE), {"a", "user"})
    assert made.new_tables == ("things",)
    name = "embeddings.embedding_bags.things.weight"
    assert torch.equal(made.tensors[f"model/{name}"], large.state_dict()[name])
    assert made.tensors["model/bottom.0.weight"][:, 1].eq(0.0).all()
    assert torch.equal(made.tensors["model/bottom.0.weight"][:, 0], small.state_dict()["bottom.0.weight"][:, 0])


def test_removed_features_leave_the_rest_unchanged():
    config = DLRMConfig(embedding_width=4, bottom_mlp=(5,), top_mlp=(6,))
    large = built(config, AFTER, 2)
    fewer = FeatureState(
        dense=("b",), bags=(SparseFeature("user", "user", 5, "sum"), SparseFeature("item", "things", 9, "mean"))
    )
    made = transfer_state(
        config, state(large, 3.0), state(built(config, fewer, 4), 0.0), (AFTER, fewer), {"b", "user", "item"}
    )
    assert (made.new_tables, made.larger_tables) == ((), ())
    assert torch.equal(made.tensors["model/bottom.0.weight"][:, 0], large.state_dict()["bottom.0.weight"][:, 1])
