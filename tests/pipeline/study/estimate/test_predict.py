"""A fit recovers the costs behind its samples, is evaluated on held-out points, and scales to other machines."""

import numpy as np
import pytest

from models.config import DLRMConfig
from pipeline.errors import ConfigError
from pipeline.study.estimate.predict import TERMS, Fit, StepSample, assign_fold, fit
from pipeline.study.measure.cost import TableLoad, count_load
from pipeline.study.measure.machine import Ceilings
from pipeline.study.measure.results import Load
from pipeline.training.config import TrainConfig

RATES = {"fp32_gflops": 60.0, "bf16_gflops": 200.0, "read_gb_per_second": 10.0, "random_gb_per_second": 5.0}
HERE = Ceilings(cpu="test", cores=2, memory_bytes=1, **RATES)
TRUE = {
    "step": 1.0, "layers": 0.3, "products": 2e-8, "pairs": 5e-6, "bags": 1e-5, "parameters": 4e-7, "activations": 1e-7,
    "rows updated": 8e-7, "ranks meet": 2.0, "bytes between ranks": 1e-6,
}  # fmt: skip


def loads(count: int) -> list[tuple[Load, int]]:
    """Loads of models and batches of many shapes, on one or two ranks."""
    random = np.random.default_rng(3)

    def one_of(*choices: int) -> int:
        return int(random.choice(choices))

    made = []
    for _ in range(count):
        rows, ranks = one_of(128, 512, 2_048, 8_192), one_of(1, 2)
        mlp = (one_of(64, 256, 1_024),) * one_of(1, 2, 3)
        model = DLRMConfig(
            embedding_width=one_of(16, 64, 128), bottom_mlp=mlp, top_mlp=mlp,
            interaction=["dot", "cat"][one_of(0, 1)],
        )  # fmt: skip
        lookups, size = one_of(1, 10, 32), one_of(1_000, 100_000)
        uses = [TableLoad(size, lookups, size * (1 - (1 - 1 / size) ** (rows * lookups)))] * one_of(4, 16, 64)
        made.append((count_load(model, one_of(64, 1_024), uses, TrainConfig(batch_rows=rows, world_size=ranks)), ranks))
    return made


def samples(count: int, noise: float) -> list[StepSample]:
    """Steps with the costs in `TRUE`, times noise."""
    random = np.random.default_rng(5)
    made = []
    for number, (load, ranks) in enumerate(loads(count)):
        step = sum(cost * TERMS[name].amount(load, ranks) for name, cost in TRUE.items())
        made.append(StepSample(key=f"{number}", load=load, world_size=ranks, step_ms=step * random.lognormal(0, noise)))
    return made


def test_costs_are_found_again() -> None:
    exact = samples(120, noise=0.0)
    found = fit(exact, HERE)
    assert found.unit_ms.keys() == TERMS.keys()
    whole = sum(one.step_ms for one in exact)
    for name, cost in found.unit_ms.items():
        amount = sum(TERMS[name].amount(one.load, one.world_size) for one in exact)
        assert cost * amount / whole == pytest.approx(TRUE.get(name, 0.0) * amount / whole, abs=0.02), name
    assert found.errors is not None
    assert found.errors.median < 0.02
    assert Fit.model_validate_json(found.model_dump_json()) == found


def test_work_that_no_sample_has_costs_what_is_typical() -> None:
    alone = [one for one in samples(40, noise=0.0) if one.world_size == 1]
    per_core = HERE.fp32_gflops / HERE.cores
    assert fit(alone, HERE).unit_ms["ranks meet"] == pytest.approx(TERMS["ranks meet"].typical / per_core)


def test_points_are_evaluated_by_fits_without_them() -> None:
    noisy = samples(120, noise=0.1)
    found = fit(noisy, HERE)
    assert found.errors is not None
    assert found.errors.points == found.fitted == len(found.unseen_ms) == 120
    off = [abs(found.unseen_ms[one.key] / one.step_ms - 1) for one in noisy]
    assert found.errors.median == pytest.approx(np.median(off))
    assert 0.02 < found.errors.median < 0.15
    assert found.errors.ninth_decile == pytest.approx(np.quantile(off, 0.9))
    first = [one for one in noisy if assign_fold(one.key) == 0]
    assert 120 / 6 < len(first) < 120 / 3
    others = fit([one for one in noisy if assign_fold(one.key) != 0], HERE)
    wild = fit([one.model_copy(update={"step_ms": 1e3}) if assign_fold(one.key) == 0 else one for one in noisy], HERE)
    for one in first:  # their own times play no part
        assert wild.unseen_ms[one.key] == found.unseen_ms[one.key] == others.predict(one.load, one.world_size).step_ms


def test_a_single_point_has_no_evaluation() -> None:
    found = fit(samples(1, noise=0.0), HERE)
    assert found.errors is None
    assert found.unseen_ms == {}


def test_a_machine_twice_as_fast_takes_half_the_time() -> None:
    found, (load, ranks) = fit(samples(60, noise=0.0), HERE), loads(1)[0]
    twice = HERE.model_copy(update={name: 2 * value for name, value in RATES.items()})
    here = found.predict(load, ranks)
    assert found.predict(load, ranks, HERE) == here
    assert found.predict(load, ranks, twice).step_ms == pytest.approx(here.step_ms / 2)
    assert sum(here.terms_ms.values()) == pytest.approx(here.step_ms)


def test_each_term_scales_by_its_own_ceiling() -> None:
    found, (load, ranks) = fit(samples(60, noise=0.0), HERE), loads(1)[0]
    here = found.predict(load, ranks).terms_ms
    memory = found.predict(load, ranks, HERE.model_copy(update={"read_gb_per_second": 40.0})).terms_ms
    assert {name for name in here if memory[name] != here[name]} == {"parameters", "activations"} & here.keys()
    assert memory["parameters"] == pytest.approx(here["parameters"] / 4)
    # more cores of the same speed: the work of one core takes as long
    more = HERE.model_copy(update={"fp32_gflops": 120.0, "cores": 4})
    cores = found.predict(load, ranks, more).terms_ms
    assert cores["layers"] == pytest.approx(here["layers"])
    assert cores["products"] == pytest.approx(here["products"] / 2)


def test_products_scale_by_the_configured_precision() -> None:
    found, (load, ranks) = fit(samples(60, noise=0.0), HERE, "bf16"), loads(1)[0]
    faster = found.predict(load, ranks, HERE.model_copy(update={"bf16_gflops": 400.0})).terms_ms
    assert faster["products"] == pytest.approx(found.predict(load, ranks).terms_ms["products"] / 2)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        fit([], HERE)
    assert str(refused.value) == "samples: expected at least one to fit, got none. Measure some points."
