"""Prediction of step times on a machine from measured steps of other models.

A step is a sum of terms: an amount of work counted in `cost.py`, times its unit cost on this machine. The unit costs
are fitted and non-negative, so each term of a prediction can be read by itself. On another machine, each unit cost
scales inversely with the ceiling of its term.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from scipy.optimize import nnls

from pipeline.errors import ConfigError
from pipeline.study.measure.machine import Ceilings
from pipeline.study.measure.results import Load

ROUNDS = 12
"""Rounds of fitting. Each reweights the samples."""
FOLDS = 4
"""Folds of the cross-validation: each quarter of the samples is predicted from the other three."""
LEAST_ERROR = 0.02
"""Relative errors below this count as measurement noise."""
PULL = 0.01
"""Weight of the pull towards typical costs, relative to one sample. A few samples cannot separate kinds of work that
mostly occur together."""


class StepSample(BaseModel, frozen=True):
    """A measured step."""

    key: str
    """Key of the point. Determines the fold that evaluates it."""
    load: Load
    world_size: int
    """Ranks. They share the cores of the machine."""
    step_ms: float


Ceiling = Literal["products", "arithmetic", "read", "random", "core"]
"""products: matrix products in the configured precision. arithmetic: other work that all cores share. read, random:
memory. core: work of one core, mostly Python and the launch of operators."""


class Term(NamedTuple):
    """A term of the sum that makes a step."""

    ceiling: Ceiling
    typical: float
    """Milliseconds per unit at a ceiling of 1, roughly, on a Xeon. At the ceiling itself, one operation of a matrix
    product or one byte from memory takes 1e-6."""
    amount: Callable[[Load, int], float]
    """(load, ranks) -> units per step."""


TERMS: dict[str, Term] = {
    "step": Term("core", 3e2, lambda load, ranks: 1.0),
    "layers": Term("core", 6.0, lambda load, ranks: load.layers),
    "features": Term("core", 6.0, lambda load, ranks: load.sparse_features / ranks),
    "products": Term("products", 1.3e-6, lambda load, ranks: load.mlp_flop),
    "interaction": Term("products", 2e-6, lambda load, ranks: load.interaction_flop),
    "pairs": Term("arithmetic", 2e-4, lambda load, ranks: load.interaction_flop / load.embedding_width),
    "bags": Term("arithmetic", 2e-2, lambda load, ranks: load.rows * load.sparse_features),
    "rows added up": Term("arithmetic", 5e-5, lambda load, ranks: load.lookups * load.embedding_width),
    "parameters": Term("read", 1.5e-6, lambda load, ranks: load.dense_bytes - load.activation_bytes),
    "activations": Term("read", 8e-7, lambda load, ranks: load.activation_bytes),
    "rows found": Term("random", 5e-4, lambda load, ranks: load.distinct_rows),
    "rows updated": Term("random", 6e-6, lambda load, ranks: load.distinct_rows * load.embedding_width),
    "ranks meet": Term("core", 3e2, lambda load, ranks: float(ranks > 1)),
    "bytes between ranks": Term("read", 1.2e-5, lambda load, ranks: load.communication_bytes),
}


class Errors(BaseModel, frozen=True):
    """Relative errors |predicted / measured - 1| in cross-validation."""

    points: int
    median: float
    ninth_decile: float


class Prediction(BaseModel, frozen=True):
    """Predicted time of a step."""

    step_ms: float
    terms_ms: Mapping[str, float]
    """TERMS -> milliseconds, without zero terms. They add up to the step."""


class Fit(BaseModel, frozen=True):
    """Fitted costs of work on a machine."""

    ceilings: Ceilings
    dense_precision: Literal["fp32", "bf16"]
    unit_ms: Mapping[str, float]
    """TERMS -> milliseconds per unit."""
    fitted: int
    """Number of samples in the fit."""
    unseen_ms: Mapping[str, float] = {}
    """Sample key -> step predicted from the samples of the other folds."""
    errors: Errors | None = None
    """Errors of `unseen_ms`. None: there are no other folds."""

    def predict(self, load: Load, world_size: int, on: Ceilings | None = None) -> Prediction:
        """Predicts the step of a load.

        Args:
            on: Another machine. None: the measured one.
        """
        slower = dict.fromkeys(TERMS, 1.0) if on is None else self._slower(on)
        terms = {
            name: self.unit_ms[name] * term.amount(load, world_size) * slower[name] for name, term in TERMS.items()
        }
        found = {name: value for name, value in terms.items() if value > 0.0}
        return Prediction(step_ms=sum(terms.values()), terms_ms=found)

    def _slower(self, on: Ceilings) -> dict[str, float]:
        here, there = (_rates(ceilings, self.dense_precision) for ceilings in (self.ceilings, on))
        return {name: here[term.ceiling] / there[term.ceiling] for name, term in TERMS.items()}


def _rates(ceilings: Ceilings, dense_precision: str) -> dict[Ceiling, float]:
    """Returns the rate of each kind of work. A core's own rate is its share of the matrix product rate."""
    return {
        "products": ceilings.bf16_gflops if dense_precision == "bf16" else ceilings.fp32_gflops,
        "arithmetic": ceilings.fp32_gflops,
        "read": ceilings.read_gb_per_second,
        "random": ceilings.random_gb_per_second,
        "core": ceilings.fp32_gflops / ceilings.cores,
    }


def assign_fold(key: str) -> int:
    """Returns the fold that evaluates a point, from its key alone.

    Example:
        >>> [assign_fold(key) for key in "abcde"]
        [2, 2, 2, 0, 3]
    """
    return hashlib.sha256(key.encode()).digest()[0] % FOLDS


def fit(samples: Sequence[StepSample], ceilings: Ceilings, dense_precision: Literal["fp32", "bf16"] = "fp32") -> Fit:
    """Fits unit costs to all samples, and measures their errors by cross-validation.

    Args:
        samples: From one machine, device, precision and compile setting.
        ceilings: Peak rates of that machine.
    Raises:
        ConfigError: If there is no sample.
    """
    if not samples:
        raise ConfigError("samples", "at least one to fit", "none", "Measure some points.")
    rates = _rates(ceilings, dense_precision)

    def fit_terms(seen: Sequence[StepSample]) -> Fit:
        units = dict(zip(TERMS, _units(seen, rates).tolist(), strict=True))
        return Fit(ceilings=ceilings, dense_precision=dense_precision, unit_ms=units, fitted=len(seen))

    unseen: dict[str, float] = {}
    for fold in range(FOLDS):
        seen = [one for one in samples if assign_fold(one.key) != fold]
        held_out = [one for one in samples if assign_fold(one.key) == fold]
        if seen and held_out:
            model = fit_terms(seen)
            unseen |= {one.key: model.predict(one.load, one.world_size).step_ms for one in held_out}
    whole = fit_terms(samples)
    if not unseen:
        return whole
    off = [abs(unseen[one.key] / one.step_ms - 1.0) for one in samples if one.key in unseen]
    found = Errors(points=len(off), median=float(np.median(off)), ninth_decile=float(np.quantile(off, 0.9)))
    return whole.model_copy(update={"unseen_ms": unseen, "errors": found})


def _units(samples: Sequence[StepSample], rates: Mapping[Ceiling, float]) -> npt.NDArray[np.float64]:
    """Finds non-negative costs with the least sum of relative errors, by least squares reweighted with 1 / error.

    Source:
        Lawson, Hanson 1974 (non-negative least squares); Holland, Welsch 1977 (least absolute errors by reweighting);
        Hoerl, Kennard 1970 (ridge).
    """
    typical = np.array([term.typical / rates[term.ceiling] for term in TERMS.values()])
    amounts = np.array([[term.amount(one.load, one.world_size) for term in TERMS.values()] for one in samples])
    relative = amounts * typical / np.array([[one.step_ms] for one in samples])
    drawn = np.sqrt(PULL * len(samples))
    pull, goal = drawn * np.eye(len(typical)), np.full(len(typical), drawn)
    weights = np.ones(len(samples))
    for _ in range(ROUNDS):
        times, _ = nnls(np.vstack([relative * weights[:, None], pull]), np.concatenate([weights, goal]))
        weights = 1.0 / np.sqrt(np.maximum(np.abs(relative @ times - 1.0), LEAST_ERROR))
    found: npt.NDArray[np.float64] = times * typical
    return found
