"""A model with more features takes the place of one with fewer: what both have keeps its weights."""

from collections.abc import Collection, Mapping, Sequence

import torch
from pydantic import BaseModel

from models.config import DLRMConfig, SparseFeature
from models.dlrm import Labels, axes_of, module_name
from pipeline.training.optim import TABLES

STATES = ("model/", "average/", "dense/", "tables/")
"""Beginnings of the names of tensors in a checkpoint."""


class FeatureState(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """What a model reads."""

    dense: tuple[str, ...]
    bags: tuple[SparseFeature, ...]


class TransferredState(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """The state of a model that has grown, and what of it is new."""

    tensors: Mapping[str, torch.Tensor]
    new_tables: tuple[str, ...]
    """Tables that start anew: the older model has none of the name, or their ids meant something else."""
    larger_tables: tuple[str, ...]
    """Tables with rows behind those that they had."""


def transfer_state(
    config: DLRMConfig,
    old: Mapping[str, torch.Tensor],
    fresh: Mapping[str, torch.Tensor],
    features: tuple[FeatureState, FeatureState],
    kept: Collection[str],
) -> TransferredState:
    """The state of a model with other features than the older one that it goes on from.

    Tables keep the rows that they had; new rows and tables stay as they are initially. A layer whose inputs depend on
    the features keeps the weights of those that both models have; the weights of new inputs are 0, so that where
    features only came in addition, the grown model says what the old one said until it is trained. States of
    optimizers go with their weights; those of new weights are 0.

    Args:
        old, fresh: Name -> whole tensor of the older model and of the new one in its initial state.
        features: Of the older model and of the new one.
        kept: Features whose values mean in both what they meant.
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
    """Names that are alike in both models only where the features are."""
    return [name if name in kept else f"{name} of {which}" for name in names]


def _tables(
    before: Sequence[SparseFeature], now: Sequence[SparseFeature], kept: Collection[str]
) -> tuple[set[str], list[str], list[str]]:
    """(modules of the tables that keep their rows, names of new tables, names of larger ones)."""
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
    """Parameter of the model that a tensor of a checkpoint is, or belongs to."""
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
    """Numbers of both models at their new places, 0 elsewhere."""
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
