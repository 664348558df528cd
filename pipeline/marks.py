"""Marks on the keys of a config: which of them decide what a training learns. Keys without a mark do."""

from enum import Enum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Mark(Enum):
    """Put on a key as `Annotated[kind, APART]`."""

    APART = "does not change what is learned; of a section, only its keys that are marked as learned do"
    LEARNED = "changes what is learned, in a section that is apart"
    PLACEMENT = "changes the last bits of what is learned, and not even these in lanes"


APART, LEARNED, PLACEMENT = Mark


def keys_apart(section: type[BaseModel]) -> set[str]:
    """Returns the keys of a section that do not change what is learned."""
    return {key for key, field in section.model_fields.items() if APART in field.metadata}


def learned_values(section: BaseModel, lanes: bool) -> dict[str, Any]:
    """Returns a section as JSON values, without the keys that do not change what is learned.

    Args:
        lanes: The weights are the same for every placement.
    """
    return _keep_learned(section, section.model_dump(mode="json"), LEARNED, lanes)


def _keep_learned(section: BaseModel, values: dict[str, Any], default: Mark, lanes: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, field in type(section).model_fields.items():
        value, mark = getattr(section, key), _mark_of(field, default, lanes)
        if isinstance(value, BaseModel):
            inner = _keep_learned(value, values[key], mark, lanes)
            if inner or mark is LEARNED:
                kept[key] = inner
        elif mark is LEARNED and isinstance(value, tuple) and any(isinstance(one, BaseModel) for one in value):
            kept[key] = [_keep_learned(*pair, mark, lanes) for pair in zip(value, values[key], strict=True)]
        elif mark is LEARNED:
            kept[key] = values[key]
    return kept


def _mark_of(field: FieldInfo, default: Mark, lanes: bool) -> Mark:
    mark = next((mark for mark in field.metadata if isinstance(mark, Mark)), default)
    return (APART if lanes else LEARNED) if mark is PLACEMENT else mark
