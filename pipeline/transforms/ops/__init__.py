"""All transform ops, one frozen class each: same rows in, same rows out, however they are chunked."""

from typing import Annotated, Any

from pydantic import Field

from pipeline.transforms.ops.dense import BoxCox, Clamp, FillNull, Log, Logit, Standardise
from pipeline.transforms.ops.discrete import Bucketize, GetLocalHour, Onehot
from pipeline.transforms.ops.lists import Cartesian, IdListTransform, NGram, PositiveIntersect
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, VALUE, Count, Counts, Op, as_id
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.ops.score import ComputeScore
from pipeline.transforms.ops.sparse import Enumerate, FirstX, MapId, SigridHash

__all__ = [
    "ID_MAX",
    "ID_MIN",
    "VALUE",
    "AnyOp",
    "BoxCox",
    "Bucketize",
    "Cartesian",
    "Clamp",
    "ComputeScore",
    "Count",
    "Counts",
    "Enumerate",
    "FillNull",
    "FirstX",
    "GetLocalHour",
    "IdListTransform",
    "Log",
    "Logit",
    "MapId",
    "NGram",
    "Onehot",
    "Op",
    "PositiveIntersect",
    "Sampling",
    "SigridHash",
    "Standardise",
    "as_id",
    "known_kinds",
]

AnyOp = Annotated[
    BoxCox
    | Bucketize
    | Cartesian
    | Clamp
    | ComputeScore
    | Enumerate
    | FillNull
    | FirstX
    | GetLocalHour
    | IdListTransform
    | Log
    | Logit
    | MapId
    | NGram
    | Onehot
    | PositiveIntersect
    | SigridHash
    | Standardise,
    Field(discriminator="kind"),
]


def known_kinds() -> dict[str, Any]:
    """Kind -> op class, for documentation and tests."""
    return {cls.model_fields["kind"].default: cls for cls in Op.__subclasses__()}
