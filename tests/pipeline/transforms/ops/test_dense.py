"""Ops that keep the kind of their values."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.transforms.ops.dense import BoxCox, Clamp, FillNull, Log, Logit, Standardise
from pipeline.transforms.ops.op import Op
from tests.pipeline.transforms.contract import MILLION, Case, apply


def logit(p: float) -> float:
    return p if math.isnan(p) else float(scipy.special.logit(min(max(p, 0.01), 0.99))) if 0 <= p <= 1 else -7.0


def box_cox(x: float) -> float:
    if math.isnan(x) or not 0 < x + 4.0 < math.inf:
        return x if math.isnan(x) else -7.0
    return float(scipy.special.boxcox(x + 4.0, 0.3))


DENSE, SPARSE = ("dense",), ("sparse",)
EXAMPLES = {
    "box_cox": Case(BoxCox(power=0.3, shift=4.0, invalid=-7.0), box_cox),
    "clamp": Case(Clamp(low=-3, high=40), lambda x: x if math.isnan(x) else min(max(x, -3.0), 40.0), DENSE),
    "clamp ids": Case(Clamp(low=-3, high=40), lambda ids: [min(max(i, -3), 40) for i in ids], SPARSE),
    "clamp to the largest id": Case(Clamp(low=0, high=1e30), lambda ids: [max(i, 0) for i in ids], SPARSE),
    "clamp between fractions": Case(Clamp(low=0.5, high=3.5), lambda ids: [min(max(i, 1), 3) for i in ids], SPARSE),
    "clamp to a fraction": Case(Clamp(low=-0.5, high=-0.5), lambda ids: [-1 for _ in ids], SPARSE),
    "fill_null": Case(FillNull(value=2.5), lambda x: 2.5 if math.isnan(x) else x, DENSE),
    "fill_null ids": Case(FillNull(value=7), lambda ids: ids or [7], SPARSE),
    "log": Case(Log(), lambda x: x if math.isnan(x) else math.log1p(max(x, 0.0))),
    "logit": Case(Logit(eps=0.01, invalid=-7.0), logit),
    "standardise": Case(Standardise(mean=3.0, std=0.5), lambda x: (x - 3.0) / 0.5),
}


@pytest.mark.parametrize("power", [-2.0, -1e-9, 0.0, 1e-17, 1e-6, 0.5, 1.0, 3.0])
def test_box_cox_is_scipys(power: float) -> None:
    x = np.geomspace(1e-6, 1e6, 50)
    np.testing.assert_allclose(apply(BoxCox(power=power), x.tolist()), scipy.stats.boxcox(x, power), rtol=1e-12)


def test_logit_is_scipys() -> None:
    p = np.linspace(0, 1, 101)
    held = np.clip(p, 1e-6, 1 - 1e-6)
    np.testing.assert_allclose(apply(Logit(), p.tolist()), scipy.special.logit(held), rtol=1e-9, atol=1e-12)


@pytest.mark.nightly
def test_a_million_ids() -> None:
    assert apply(Clamp(low=0, high=9), [[], [MILLION] * MILLION, [-4]]) == [[], [9] * MILLION, [0]]
    assert apply(FillNull(value=3), [[], [5] * MILLION, []]) == [[3], [5] * MILLION, [3]]


@pytest.mark.parametrize(
    ("op", "rows", "counted"),
    [
        (FillNull(), [1.0, math.nan, math.nan], {"fill_null value": 2}),
        (FillNull(value=3), [[], [1], []], {"fill_null value": 2}),
        (Clamp(low=0, high=1), [-1.0, 0.5, 2.0, math.nan], {"clamp value": 2}),
        (Clamp(low=0, high=1), [[-1, 1], [2]], {"clamp value": 2}),
        (Log(), [-1.0, 0.0, math.nan], {"log value": 1}),
        (Logit(), [-0.1, 1.1, 0.0, 1.0, math.nan], {"logit value": 2}),
        (BoxCox(power=2), [0.0, -1.0, math.inf, 1.0, math.nan], {"box_cox value": 3}),
    ],
)
def test_changed_values_are_counted(op: Op, rows: list[Any], counted: dict[str, int]) -> None:
    counts = Counter[str]()
    apply(op, rows, counts=counts)
    assert counts == counted


@pytest.mark.parametrize(
    ("op", "limit", "bound"),
    [
        (Clamp(low=0, high=9.5), None, 10),
        (Clamp(low=-1, high=9), 5, None),
        (Clamp(low=-0.5, high=-0.5), 5, None),
        (Clamp(low=0, high=9), 5, 5),
        (FillNull(value=7), 5, 8),
        (FillNull(value=7), None, None),
        (FillNull(value=-1), 5, None),
    ],
)
def test_bounds_of_ids(op: Op, limit: int | None, bound: int | None) -> None:
    assert op.ids_below(limit) == bound


def test_bound_and_fit_return_new_ops() -> None:
    op = Standardise()
    fitted = op.bound(("age:dense",), "age").fit(2.0, 0.0)
    assert (op.fitted, fitted.fitted, fitted.inputs, fitted.output) == (False, True, ("age:dense",), "age")
    assert apply(fitted, [2.0, 3.0]) == [0.0, 1.0]  # a deviation of 0 only shifts


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Clamp(low=2, high=1), "clamp: expected low <= high, got [2.0, 1.0]. Swap them."),
        (
            lambda: Standardise(mean=1.0),
            "standardise: expected both mean and std, or neither, got one of them. Give the other, or leave both out.",
        ),
        (
            lambda: apply(Standardise(output="age"), [1.0]),
            "standardise on 'age': expected a fitted mean and std, got none. Fit the plan first.",
        ),
    ],
)
def test_errors_say_what_to_do(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Logit, {"eps": 0.5}),
        (Logit, {"eps": 0.0}),
        (FillNull, {"value": math.nan}),
        (Standardise, {"mean": 0.0, "std": 0.0}),
        (Log, {"base": 10}),
    ],
)
def test_fields_out_of_range_are_refused(cls: type[Op], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**fields)
