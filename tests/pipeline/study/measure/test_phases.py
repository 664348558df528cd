"""The division of a step's time agrees with steps that time their own parts."""

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from pipeline.study.measure.phases import BACKWARD, Span, StepPart, Timeline, note_calls, split_step
from pipeline.study.measure.results import PHASES

CPU = torch.device("cpu")
STEPS = 5
ATTEMPTS = 20


def timed(work: Callable[[], Any], taken: list[float]) -> Callable[[], None]:
    """Work that records its milliseconds."""

    def call() -> None:
        start = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - start))

    return call


def interpreted(numbers: int = 60_000) -> None:
    """A few milliseconds of Python."""
    sum(i * i for i in range(numbers))


def undisturbed(check: Callable[[], None]) -> None:
    """Repeats a check of times, because other processes may slow down any part of a step."""
    for _ in range(ATTEMPTS - 1):
        with suppress(AssertionError):
            return check()
    return check()


def test_python_and_kernels_of_known_length() -> None:
    matrix = torch.rand(400, 400)
    loop, kernel = list[float](), list[float]()
    step = SimpleNamespace(
        loop=timed(interpreted, loop), kernel=timed(lambda: [matrix @ matrix for _ in range(4)], kernel)
    )
    parts = [StepPart(step, "loop", "embedding"), StepPart(step, "kernel", "mlp")]

    def both() -> None:
        step.loop()
        step.kernel()

    def check() -> None:
        found = split_step(both, parts, STEPS, loop[-1] + kernel[-1], CPU)
        loops, kernels = min(zip(loop[-STEPS:], kernel[-STEPS:], strict=True), key=sum)  # the fastest step is split
        assert found.outside_ms == pytest.approx(median(loop[-STEPS:]), rel=0.1, abs=0.5)
        assert found.shares["embedding"] == pytest.approx(loops / (loops + kernels), abs=0.1)
        assert found.shares["mlp"] == pytest.approx(kernels / (loops + kernels), abs=0.1)
        assert sum(found.shares.values()) == pytest.approx(1.0)
        assert tuple(found.shares) == PHASES

    both()
    undisturbed(check)


@pytest.mark.parametrize(("each_us", "longer_us", "optimizer"), [(7, 5, 0.35), (1, 5, (600 - 295) / (1_000 - 295))])
def test_the_profilers_own_time_is_taken_off(each_us: int, longer_us: int, optimizer: float) -> None:
    """A hundred short operators and a long one. Each takes longer under the profiler. Of short ones half remains."""
    apart = 1_000 * (each_us + longer_us)
    small = [Span(apart * i, apart * (i + 1) - 100, None, compiled=True, noted=True) for i in range(100)]
    middle = 100 * apart
    stop = {7: 2_500_000, 1: 1_000_000}[each_us]
    step = Span(0, stop, "other")
    timeline = Timeline([step, Span(0, middle, "optimizer"), Span(middle, stop, "mlp"), *small])
    shares = timeline.shares([step], step_ms=1e-6 * stop - 0.1 * longer_us)
    assert (shares["optimizer"], shares["mlp"]) == pytest.approx((optimizer, 1.0 - optimizer))


class Slow(torch.autograd.Function):
    """Its backward pass is Python, much longer than what autograd and the step itself spend in Python."""

    taken: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        timed(lambda: interpreted(600_000), Slow.taken)()
        return gradient


def test_a_backward_pass_belongs_to_the_phase_of_its_forward_pass() -> None:
    weight = torch.rand(300, 300, requires_grad=True)
    model = SimpleNamespace(layers=lambda values: values @ weight @ weight @ weight @ weight, tables=Slow.apply)
    parts = [
        StepPart(model, "layers", "mlp"), StepPart(model, "tables", "embedding"), StepPart(torch.autograd, "backward", BACKWARD)
    ]  # fmt: skip
    rows = torch.rand(2_000, 300)

    def step() -> None:
        model.layers(model.tables(rows * weight.sum())).sum().backward()

    def check() -> None:
        found = split_step(step, parts, STEPS, 1e6, CPU)
        assert found.outside_ms == pytest.approx(median(Slow.taken[-STEPS:]), rel=0.3, abs=1.0)
        assert found.shares["mlp"] > found.shares["other"]
        assert found.shares["embedding"] > 0.02

    step()
    undisturbed(check)


def test_methods_are_restored_after_the_block() -> None:
    module = torch.nn.Linear(2, 2)
    spans: list[Span] = []
    before = dict(vars(module)), torch.autograd.backward
    with note_calls([StepPart(module, "forward", "mlp"), StepPart(torch.autograd, "backward", BACKWARD)], spans):
        module(torch.ones(1, 2)).sum().backward()
    assert (dict(vars(module)), torch.autograd.backward) == before
    assert [span.phase for span in spans] == ["mlp", BACKWARD]


def test_of_spans_inside_one_another_the_innermost_counts() -> None:
    spans = [
        Span(0, 100, "other"), Span(10, 60, "embedding"), Span(20, 30, "communication", compiled=True),
        Span(40, 50, None, compiled=True), Span(42, 45, "mlp"), Span(70, 90, BACKWARD),
    ]  # fmt: skip
    timeline = Timeline(spans)
    shares = timeline.shares([spans[0]], step_ms=1.0)
    assert {phase: round(100 * share) for phase, share in shares.items() if share} == {
        "embedding": 37, "communication": 10, "mlp": 3, "other": 50,
    }  # fmt: skip
    assert timeline.outside(spans[0]) == 80
    assert [timeline.phase(at) for at in (5, 15, 25, 43, 75, 95)] == [
        "other", "embedding", "communication", "mlp", BACKWARD, "other",
    ]  # fmt: skip
