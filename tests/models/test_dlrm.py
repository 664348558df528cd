"""DLRM against a plain re-implementation on nn.EmbeddingBag."""

import pytest
import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM, SharedFeatures
from models.tables import tables_of

BAGS = (
    SparseFeature("user", "user", 11, "sum"),
    SparseFeature("seen", "item", 7, "mean"),
    SparseFeature("item", "item", 7, "mean"),  # shares the table of `seen`
)
LENGTHS = torch.tensor([[1, 0, 2, 1], [3, 0, 1, 2], [1, 1, 0, 1]])  # empty bags among them


@pytest.fixture
def sparse() -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(5)
    values = [
        torch.randint(bag.rows, (int(lengths.sum()),), generator=random)
        for bag, lengths in zip(BAGS, LENGTHS, strict=True)
    ]
    return KeyedJaggedTensor(keys=[bag.name for bag in BAGS], values=torch.cat(values), lengths=LENGTHS.flatten())


def plain(model: DLRM, dense: torch.Tensor, sparse: KeyedJaggedTensor, kind: str) -> torch.Tensor:
    """The same model, written from its parameters alone."""
    weights = dict(model.named_parameters())

    def layers(name: str, count: int, x: torch.Tensor) -> torch.Tensor:
        for i in range(count):
            x = F.relu(F.linear(x, weights[f"{name}.{2 * i}.weight"], weights[f"{name}.{2 * i}.bias"]))
        return x

    vectors = [layers("bottom", 2, dense)] if dense.shape[1] else []
    for bag in BAGS:
        ids = sparse[bag.name]
        table = weights[f"embeddings.embedding_bags.{bag.table}.weight"]
        vectors.append(F.embedding_bag(ids.values(), table, ids.offsets()[:-1], mode=bag.pooling))
    if kind == "dot":
        pairs = [(a * b).sum(1, keepdim=True) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
        joint = torch.cat([vectors[0], *pairs], dim=1)
    else:
        first = joint = torch.cat(vectors, dim=1)
        for i in range(2 if kind == "dcn" else 0):
            cross = F.linear(joint, weights[f"interaction.cross.kernels.{i}"])
            joint = first * (cross + weights[f"interaction.cross.bias.{i}"].flatten()) + joint
    return F.linear(layers("top", 1, joint), weights["logit.weight"], weights["logit.bias"]).squeeze(1)


@pytest.mark.parametrize("kind", ["dot", "cat", "dcn"])
@pytest.mark.parametrize("num_dense", [0, 3])
def test_same_logits_and_gradients_as_the_plain_model(sparse: KeyedJaggedTensor, kind: str, num_dense: int) -> None:
    torch.manual_seed(6)
    config = DLRMConfig(embedding_width=4, bottom_mlp=(8,), top_mlp=(6,), interaction=kind)
    model = DLRM(config, num_dense, BAGS)
    dense = torch.randn(4, num_dense)
    logits, expected = model(dense, sparse), plain(model, dense, sparse, kind)
    torch.testing.assert_close(logits, expected)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(out.square().sum(), parameters) for out in (logits, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_no_top_layers_leave_one_linear() -> None:
    model = DLRM(DLRMConfig(embedding_width=4, top_mlp=(), interaction="cat"), 2, BAGS)
    assert model.logit.weight.shape == (1, 16)


def test_features_of_one_table_share_it() -> None:
    tables = tables_of(BAGS)
    assert [(table.name, table.rows, table.features) for table in tables] == [
        ("user", 11, ("user",)),
        ("item", 7, ("seen", "item")),
    ]


@pytest.mark.parametrize("other", [SparseFeature("b", "t", 6, "sum"), SparseFeature("b", "t", 5, "mean")])
def test_features_of_one_table_must_agree(other: SparseFeature) -> None:
    with pytest.raises(ValueError, match=r"table 't': its features \['a', 'b'\] must agree in size and pooling"):
        tables_of([SparseFeature("a", "t", 5, "sum"), other])


def test_one_vector_has_no_pair() -> None:
    with pytest.raises(ValueError, match="at least 2 vectors, got 1"):
        DLRM(DLRMConfig(interaction="dot"), 0, BAGS[:1])


def test_features_may_have_the_names_of_module_methods() -> None:
    bags = [SparseFeature(name, name, 5, "sum") for name in ("type", "items", "training", "user")]
    model = DLRM(DLRMConfig(embedding_width=4, bottom_mlp=(), top_mlp=()), 0, bags)
    sparse = KeyedJaggedTensor([bag.name for bag in bags], torch.arange(4), lengths=torch.ones(4, dtype=torch.int32))
    assert model(torch.empty(1, 0), sparse).shape == (1,)
    assert "embeddings.embedding_bags.type_.weight" in model.state_dict()


@pytest.mark.parametrize("features", [(1,), (0, 2), (0, 1, 2)])
def test_deduplicated_features_train_the_plain_model(features: tuple[int, ...]) -> None:
    """Losses and weights of 25 Adagrad steps, for rows with their own bags and for rows that share them."""
    random = torch.Generator().manual_seed(8)
    torch.manual_seed(6)
    models = [DLRM(DLRMConfig(embedding_width=4, bottom_mlp=(8,), top_mlp=(6,)), 3, BAGS) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adagrad(model.parameters(), 0.1) for model in models]
    for _ in range(25):
        inverse = torch.tensor([0, 0, 1, 1, 1, 2])
        bags = [
            [torch.randint(bag.rows, (int(n),), generator=random) for n in torch.randint(4, (6,), generator=random)]
            for bag in BAGS
        ]
        none = torch.empty(0, dtype=torch.int64)
        once = [[*bag[:3], none, none, none] if f in features else bag for f, bag in enumerate(bags)]
        each = [[bag[i] for i in inverse] if f in features else bag for f, bag in enumerate(bags)]
        dense, labels = torch.randn(6, 3, generator=random), torch.randint(2, (6,), generator=random).float()
        losses = []
        inputs = [(jagged(each),), (jagged(once), SharedFeatures(inverse, features))]
        for model, optimizer, given in zip(models, optimizers, inputs, strict=True):
            loss = F.binary_cross_entropy_with_logits(model(dense, *given), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, atol=1e-5, rtol=0.0)


def jagged(bags: list[list[torch.Tensor]]) -> KeyedJaggedTensor:
    rows = [ids for feature in bags for ids in feature]
    lengths = torch.tensor([len(ids) for ids in rows])
    return KeyedJaggedTensor(keys=[bag.name for bag in BAGS], values=torch.cat(rows), lengths=lengths)
