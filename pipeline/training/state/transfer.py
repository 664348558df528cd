"""State transfer: a model with other features starts with the weights that it shares with an older model."""

from collections.abc import Collection, Mapping, Sequence

import torch
from pydantic import BaseModel

from models.config import DLRMConfig, SparseFeature
from models.dlrm import Labels, axes_of
from models.tables import TABLES, module_name

STATES = ("model/", "average/", "dense/", "tables/")
"""Prefixes of tensor names in a checkpoint."""


class FeatureState(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """Features that a model reads."""

    dense: tuple[str, ...]
    bags: tuple[SparseFeature, ...]


class TransferredState(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """State of the new model, and the tables that are new or larger in it."""

    tensors: Mapping[str, torch.Tensor]
    new_tables: tuple[str, ...]
    """Tables that start from initial values. The older model has no such table, or its ids had another meaning."""
    larger_tables: tuple[str, ...]
    """Tables with more rows than before."""


def transfer_state(
    config: DLRMConfig,
    old: Mapping[str, torch.Tensor],
    fresh: Mapping[str, torch.Tensor],
    features: tuple[FeatureState, FeatureState],
    kept: Collection[str],
) -> TransferredState:
    """Builds the state of a model that continues an older model with other features.

    Tables keep their rows. New rows and new tables keep their initial values. Some layers have inputs that depend on
    the features. They keep the weights of inputs that both models have, and the weights of new inputs are 0. If
    features were only added, the new model therefore predicts the same as the old one until it is trained. Optimizer
    state follows its weights and is 0 for new weights.

    Args:
        old, fresh: Name -> whole tensor of the older model, and of the new model in its initial state.
        features: Features of the older model and of the new model.
        kept: Features with the same meaning in both models.
    """
    before, now = features
    axes = [
        axes_of(config, _marked(side.dense, kept, i), _marked([bag.name for bag in side.bags], kept, i))
        for i, side in enumerate(features)
    ]
    tables, new, larger = _tables(before.bags, now.bags, kept)
    result: dict[str, torch.Tensor] = {}
    for name, tensor in fresh.items():
        parameter = _parameter(name)
        table = parameter.removeprefix(TABLES).removesuffix(".weight") if parameter.startswith(TABLES) else None
        if table is not None:
            result[name] = _leading(tensor, old.get(name)) if table in tables else tensor
        elif parameter in axes[1] and parameter in axes[0] and name in old and tensor.dim():
            result[name] = _mapped(old[name], tensor, axes[0][parameter], axes[1][parameter])
        else:
            result[name] = old[name] if name in old and old[name].shape == tensor.shape else tensor
    return TransferredState(tensors=result, new_tables=tuple(new), larger_tables=tuple(larger))


def _marked(names: Sequence[str], kept: Collection[str], which: int) -> list[str]:
    """Returns names that are equal in both models only for kept features."""
    return [name if name in kept else f"{name} of {which}" for name in names]


def _tables(
    before: Sequence[SparseFeature], now: Sequence[SparseFeature], kept: Collection[str]
) -> tuple[set[str], list[str], list[str]]:
    """Returns (modules of tables that keep their rows, names of new tables, names of larger tables)."""
    rows, users = {bag.table: bag.rows for bag in before}, {bag.name: bag.table for bag in before}
    shared = [bag for bag in now if users.get(bag.name) == bag.table]
    changed = {bag.table for bag in shared if bag.name not in kept}
    same = {bag.table for bag in shared} - changed
    stay, new, larger = set(), [], []
    for table, count in {bag.table: bag.rows for bag in now}.items():
        if table not in same or count < rows[table]:
            new.append(table)
            continue
        stay.add(module_name(table))
        if count > rows[table]:
            larger.append(table)
    return stay, new, larger


def _parameter(name: str) -> str:
    """Returns the model parameter that a tensor of a checkpoint is or belongs to."""
    kind, _, rest = name.partition("/")
    return rest if kind in ("model", "average") else rest.rpartition("/")[0]


def _leading(fresh: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is None or fresh.shape[1:] != old.shape[1:]:
        return fresh
    result = fresh.clone()
    result[: len(old)] = old
    return result


def _mapped(
    old: torch.Tensor, fresh: torch.Tensor, before: tuple[Labels | None, ...], now: tuple[Labels | None, ...]
) -> torch.Tensor:
    """Copies the values that both models have to their new positions, with 0 elsewhere."""
    result = torch.zeros_like(fresh)
    sources, places = [], []
    for axis, (theirs, ours) in enumerate(zip(before, now, strict=True)):
        if theirs is None or ours is None:
            both = [(i, i) for i in range(fresh.shape[axis])]
        else:
            known = {label: i for i, label in enumerate(theirs)}
            both = [(known[label], i) for i, label in enumerate(ours) if label in known]
        sources.append(torch.tensor([pair[0] for pair in both], dtype=torch.long))
        places.append(torch.tensor([pair[1] for pair in both], dtype=torch.long))
    result[torch.meshgrid(*places, indexing="ij")] = old[torch.meshgrid(*sources, indexing="ij")]
    return result
