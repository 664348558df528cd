"""All transform ops, one frozen class each: same rows in, same rows out, however they are chunked."""

from typing import Annotated, Any

from pydantic import Field

from pipeline.transforms.dense import BoxCox, Clamp, FillNull, Log, Logit, Standardise
from pipeline.transforms.discrete import Bucketize, GetLocalHour, Onehot
from pipeline.transforms.generate import Cartesian, IdListTransform, NGram, PositiveIntersect
from pipeline.transforms.op import ID_MAX, ID_MIN, VALUE, Count, Counts, Op, as_id
from pipeline.transforms.sampling import Sampling
from pipeline.transforms.score import ComputeScore
from pipeline.transforms.sparse import Enumerate, FirstX, MapId, SigridHash

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
