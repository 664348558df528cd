"""Carries learned numbers over from an older plan, and finds the features with unchanged meaning."""

from pydantic import BaseModel

from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.dense import Standardise
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.sparse import MapId
from pipeline.transforms.ops.weigh import Weigh
from pipeline.transforms.plan.fit import needs_fit
from pipeline.transforms.plan.plan import Plan
from pipeline.transforms.plan.schedule import upstream_columns

LEARNED: dict[type[PlannedOp], dict[str, None]] = {
    Bucketize: {"borders": None},
    MapId: {"vocabulary": None},
    Standardise: {"mean": None, "std": None},
}
"""Op -> the fields that it learns, with their values before the fit."""


class Start(BaseModel, frozen=True):
    """A training to continue."""

    checkpoint: str
    """Folder of the verified checkpoint."""
    plan: Plan
    """Of its model."""
    store: str | None = None
    """Address in an object store of the folder that has the checkpoint, for hosts that do not see it."""


def carry_over_fit(plan: Plan, old: Plan) -> Plan:
    """Returns the plan with the numbers that the same ops learned in an older plan. New ops stay unfitted.

    A model in incremental training needs its inputs on the scale that it knows. An op that reads a column which the
    older plan's table lacked and the new one has is not carried over, because it learned nothing.
    """
    given, plan, old = plan, _unweighed(plan), _unweighed(old)
    new = set(old.absent) - set(plan.absent)
    taught = {op.output: op for op in old.ops if not new & old.columns_of_op(op)}
    known: dict[str, PlannedOp] = {}
    for op in plan.ops:
        before = taught.get(op.output)
        upstream = [name for name in op.inputs if name in known or name in taught]
        same = all(known.get(name) == taught.get(name) for name in upstream)
        fits = needs_fit(op) and before is not None and same and _unlearned(before) == op
        known[op.output] = before if fits and before is not None else op
    names = _plain_names(given)
    ops = (
        op if isinstance(op, Weigh) else known[names.get(op.output, op.output)].bound(op.inputs, op.output)
        for op in given.ops
    )
    return given.model_copy(update={"ops": tuple(ops)})


def _plain_names(plan: Plan) -> dict[str, str]:
    """Returns output of the last op before a Weigh -> the feature, whose name it would have without weights."""
    made = {op.output for op in plan.ops}
    return {op.inputs[0]: op.output for op in plan.ops if isinstance(op, Weigh) and op.inputs[0] in made}


def _unweighed(plan: Plan) -> Plan:
    """Returns the plan without weights of ids: they change how rows of tables are summed, and not what ids mean."""
    names = _plain_names(plan)
    weighers = [op for op in plan.ops if isinstance(op, Weigh)]
    ops = tuple(op.bound(op.inputs, names.get(op.output, op.output)) for op in plan.ops if op not in weighers)
    direct = {op.output: op.inputs[0] for op in weighers if op.inputs[0] not in names}
    return plan.model_copy(update={"ops": ops, "direct": {**plan.direct, **direct}})


def _unlearned(op: PlannedOp) -> PlannedOp:
    return op.model_copy(update=LEARNED.get(type(op), {}))


def unchanged_features(plan: Plan, old: Plan) -> set[str]:
    """Returns the features with the same meaning as in an older plan.

    Ids keep their table rows if their vocabulary has only grown at its end.
    """
    plan, old = _unweighed(plan), _unweighed(old)
    return {name for name in {*plan.features} & {*old.features} if _same(plan, old, name)}


def _same(plan: Plan, old: Plan, feature: str) -> bool:
    if plan.direct.get(feature) != old.direct.get(feature):
        return False
    if plan.columns_of(feature) & (set(old.absent) - set(plan.absent)):
        return False
    ours, theirs = _ops_of(plan, feature), _ops_of(old, feature)
    if ours.keys() != theirs.keys():
        return False
    return all(_extends(op, theirs[output]) for output, op in ours.items())


def _ops_of(plan: Plan, feature: str) -> dict[str, PlannedOp]:
    """Returns output -> op of all ops that make a feature."""
    names = upstream_columns(plan.ops, [plan.direct.get(feature, feature)])
    return {op.output: op for op in plan.ops if op.output in names}


def _extends(op: PlannedOp, old: PlannedOp) -> bool:
    """Returns whether an op makes the ids of an older one, and possibly new ones."""
    if isinstance(op, MapId) and isinstance(old, MapId) and op.vocabulary and old.vocabulary:
        before = len(old.vocabulary)
        if op.vocabulary[:before] == old.vocabulary and op.unknown is None and old.unknown is None:
            return op.model_copy(update={"vocabulary": old.vocabulary, "size": old.size}) == old
    return op == old
