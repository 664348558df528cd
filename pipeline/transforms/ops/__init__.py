"""All transform ops, one frozen class each. An op makes the same rows from the same rows in any chunks."""

from typing import Annotated, Any, get_args

from pydantic import Field

from pipeline.transforms.ops.dense import BoxCox, Clamp, FillNull, Log, Logit, Standardise
from pipeline.transforms.ops.discrete import Bucketize, GetLocalHour, Onehot
from pipeline.transforms.ops.lists import Cartesian, IdListTransform, NGram, PositiveIntersect
from pipeline.transforms.ops.score import ComputeScore
from pipeline.transforms.ops.sparse import Enumerate, FirstX, MapId, SigridHash
from pipeline.transforms.ops.weigh import Weigh

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
"""The one list of all ops that a config can name."""
PlannedOp = Annotated[AnyOp | Weigh, Field(discriminator="kind")]
"""Ops of a plan."""


def known_kinds() -> dict[str, Any]:
    """Returns kind -> op class, for documentation and tests."""
    return {cls.model_fields["kind"].default: cls for cls in get_args(get_args(AnyOp)[0])}
