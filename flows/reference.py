"""The config reference as markdown, made from the config classes: `python -m flows.reference > docs/config.md`."""

import typing
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pipeline.config import RunConfig
from pipeline.transforms.ops import known_kinds
from pipeline.transforms.ops.op import Op, PerOp
from pipeline.transforms.schema import DenseGroup, SparseGroup

HEAD = """# Config reference

Made by `python -m flows.reference`: every key of a config file, its default and what it does. A dotted key can be given
on the command line: `python -m flows.train configs/demo.yaml training.epochs=2`.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD, *_section("", RunConfig)]
    parts += [
        "## Entries of `features.dense`\n",
        *_table(DenseGroup),
        "## Entries of `features.sparse`\n",
        *_table(SparseGroup),
    ]
    parts.append(
        "## Transforms\n\n`kind` names the op. Under `features.derived` it names its `inputs` and its `output` as well;"
        " in a group\nthey are filled in for each column.\n"
    )
    for kind, op in sorted(known_kinds().items()):
        parts.append(f"### `{kind}`\n\n{_first_paragraph(op)} Reads {_inputs(op)}, makes {op.makes}.\n")
        parts += _table(op, leave_out={"kind", "inputs", "output"})
    return "\n".join(parts)


def _inputs(op: type[Op]) -> str:
    kinds = "any number of " + op.reads[-1] if op.variadic else " and ".join(op.reads)
    return f"{kinds} (its keys decide)" if isinstance(vars(op).get("reads"), PerOp) else kinds


def _section(name: str, model: type[BaseModel]) -> list[str]:
    title = f"## `{name}`" if name else "## Top level"
    parts = [f"{title}\n\n{_first_paragraph(model)}\n", *_table(model)]
    for key, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and inner not in (DenseGroup, SparseGroup):
            parts += _section(f"{name}.{key}" if name else key, inner)
    return parts


def _table(model: type[BaseModel], leave_out: typing.Collection[str] = ("kind",)) -> list[str]:
    rows = [
        f"| `{key}` | {_default(field)} | {_meaning(field)} |"
        for key, field in model.model_fields.items()
        if key not in leave_out
    ]
    return ["| key | default | |", "|---|---|---|", *rows, ""] if rows else []


def _meaning(field: Any) -> str:
    inner = _model_in(field.annotation)
    text = field.description or (_first_paragraph(inner) if inner is not None else "")
    return " ".join(text.split())


def _default(field: Any) -> str:
    value = field.default
    if field.default_factory is not None:
        value = field.default_factory()
    if value is PydanticUndefined:
        return "**needed**"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, tuple):
        return "`[" + ", ".join(item.kind if hasattr(item, "kind") else str(item) for item in value) + "]`"
    return "none" if value is None else f"`{value}`"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *typing.get_args(annotation)]
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _first_paragraph(model: type) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    print(reference(), end="")
