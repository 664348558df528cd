"""Time of a step by phase, and its division between compiled code and the Python interpreter.

A few steps run under torch.profiler, while the parts of the model record when they begin and end. A part of the
backward pass belongs to the phase of the forward pass that created it. Autograd's sequence numbers link the two.

torch.profiler costs a few microseconds per event, more than many operators take. Nearly all of that lies inside the
events. The time between events, which is Python's, is therefore accurate. In phases the cost is subtracted: it is the
extra time of a profiled step, divided by its events.
"""

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.study.measure.results import PHASES

BACKWARD = "backward"
"""Time of the backward pass between its operators. Not a phase."""
NODE = "autograd::engine::evaluate_function: "
COLLECTIVES = ("c10d::", "gloo:", "nccl:", "record_param_comms")
COMPILED_NODE = re.compile(r"Backward\d+$|^torch::|^CompiledFunctionBackward$|^CopySlices$|^Graph")
COMPILED_REGIONS = ("CompiledFunction", "Torch-Compiled Region")
"""Events of torch.compile. Everything inside them counts as compiled."""
MOST_US = 10.0
"""Upper bound on the cost of a torch.profiler event, in microseconds."""
MOST_SHARE = 0.5
"""Upper bound on the profiler's share of a span, because the span also holds work."""


class StepPart(NamedTuple):
    """A method to time."""

    owner: Any
    """Owner of the method: an object, a class or a module."""
    method: str
    phase: str | None
    """One of PHASES, BACKWARD, or None for the phase of the caller."""
    compiled: bool = False
    """Whether it waits or works outside the interpreter without torch.profiler seeing it."""


class Span(NamedTuple):
    """A span of time, in nanoseconds."""

    start: int
    stop: int
    phase: str | None
    compiled: bool = False
    noted: bool = False
    """Whether it is an event of torch.profiler."""


class StepSplit(NamedTuple):
    """Division of the time of a step."""

    shares: dict[str, float]
    """PHASES -> share of a step. They add up to 1."""
    outside_ms: float
    """Median time of a step in the interpreter."""


def split_step(
    step: Callable[[], None],
    parts: Sequence[StepPart],
    steps: int,
    step_ms: float,
    device: torch.device,
    meet: bool = False,
) -> StepSplit:
    """Runs a few steps under the profiler and divides their time.

    Args:
        step: Runs one step. All ranks call it equally often.
        parts: Methods to time.
        step_ms: Time of a step without the profiler.
        meet: Whether a backward pass ends by waiting for the gradients of other ranks.
    """
    spans: list[Span] = []
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities, acc_events=True) as profiler:
        step()  # the first events of the profiler are slow
        if on_cuda:
            torch.cuda.synchronize(device)
        with note_calls(parts, spans):
            for _ in range(steps):
                start = time.time_ns()
                step()
                if on_cuda:
                    waited = time.time_ns()
                    torch.cuda.synchronize(device)
                    spans.append(Span(waited, time.time_ns(), None, compiled=True))
                spans.append(Span(start, time.time_ns(), "other"))
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.events())
    steps_seen = [span for span in spans if span.phase == "other"]
    seen = collect_spans(events, spans)
    timeline = Timeline([*spans, *seen, *(find_waits(spans, seen) if meet else [])])
    outside_ms = 1e-6 * median(timeline.outside(span) for span in steps_seen)
    if on_cuda:
        return StepSplit(split_device_time(events, timeline, steps_seen), outside_ms)
    return StepSplit(timeline.shares(steps_seen, step_ms), outside_ms)


@contextmanager
def note_calls(parts: Iterable[StepPart], spans: list[Span]) -> Iterator[None]:
    """Times calls of these methods inside the block, and restores the methods afterwards."""
    with ExitStack() as stack:
        for part in parts:
            own = part.method in vars(part.owner)
            original = getattr(part.owner, part.method)
            setattr(part.owner, part.method, _noting(original, part, spans))
            if own:
                stack.callback(setattr, part.owner, part.method, original)
            else:
                stack.callback(delattr, part.owner, part.method)
        yield


def _noting(original: Callable[..., Any], part: StepPart, spans: list[Span]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        start = time.time_ns()
        try:
            return original(*arguments, **named)
        finally:
            spans.append(Span(start, time.time_ns(), part.phase, part.compiled))

    return call


def collect_spans(events: Sequence[Any], noted_spans: Sequence[Span]) -> list[Span]:
    """Converts profiler events on the threads of the steps: operators, and parts of the backward pass."""
    own = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU and not event.is_async()]
    nodes = [event for event in own if event.name().startswith(NODE)]
    calling = Counter(event.start_thread_id() for event in own if event.name().startswith("aten::")).most_common(1)
    threads = {event.start_thread_id() for event in nodes} | {thread for thread, _ in calling}
    own = sorted((event for event in own if event.start_thread_id() in threads), key=lambda event: event.start_ns())
    forward = Timeline(noted_spans)
    made_in: dict[int, str] = {}
    for event in own:
        if event.scope() == 0 and event.sequence_nr() >= 0 and not event.name().startswith(NODE):
            made_in[event.sequence_nr()] = forward.phase(event.start_ns())
    found = []
    last = "other"
    for event in own:
        name, phase = event.name(), None
        if name.startswith(NODE):
            name = name.removeprefix(NODE)
            last = phase = made_in.get(event.sequence_nr(), last)
            compiled = COMPILED_NODE.search(name) is not None
        else:
            phase = "communication" if name.startswith(COLLECTIVES) else None
            compiled = "::" in name or name.startswith((*COMPILED_REGIONS, *COLLECTIVES))
        found.append(Span(event.start_ns(), event.end_ns(), phase, compiled, noted=True))
    return found


def find_waits(noted_spans: Sequence[Span], seen: Sequence[Span]) -> Iterator[Span]:
    """Finds the end of each backward pass, after its last operator, where it waits for gradients of other ranks."""
    for span in noted_spans:
        if span.phase == BACKWARD:
            inside = [one.stop for one in seen if span.start <= one.start and one.stop <= span.stop]
            yield Span(max(inside, default=span.start), span.stop, "communication", compiled=True)


class Timeline:
    """Nested spans, cut where any begins or ends. At any time the span that began last is active."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.starts: list[int] = []
        self.phases: list[str] = []
        self.compiled: list[bool] = []
        self.events: list[int] = []
        """Events of torch.profiler at the beginning of each piece."""
        open_spans: list[tuple[int, str, bool]] = []
        for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
            self._close(open_spans, span.start)
            phase, inside = open_spans[-1][1:] if open_spans else ("other", False)
            compiled = inside or span.compiled
            self._cut(span.start, span.phase or phase, compiled, int(span.noted))
            open_spans.append((span.stop, span.phase or phase, compiled))
        self._close(open_spans, None)

    def _close(self, open_spans: list[tuple[int, str, bool]], until: int | None) -> None:
        while open_spans and (until is None or open_spans[-1][0] <= until):
            stop = open_spans.pop()[0]
            phase, compiled = open_spans[-1][1:] if open_spans else ("other", False)
            self._cut(stop, phase, compiled, 0)

    def _cut(self, at: int, phase: str, compiled: bool, events: int) -> None:
        self.starts.append(max(at, self.starts[-1]) if self.starts else at)
        self.phases.append(phase)
        self.compiled.append(compiled)
        self.events.append(events)

    def phase(self, at: int) -> str:
        """Returns the phase at a time."""
        number = bisect_right(self.starts, at) - 1
        return self.phases[number] if number >= 0 else "other"

    def pieces(self, step: Span) -> Iterator[tuple[int, int]]:
        """Yields (number, nanoseconds) of the pieces of a step."""
        first = bisect_right(self.starts, step.start) - 1
        for number in range(max(first, 0), len(self.starts)):
            start = max(self.starts[number], step.start)
            if start >= step.stop:
                return
            stop = self.starts[number + 1] if number + 1 < len(self.starts) else step.stop
            yield number, max(min(stop, step.stop) - start, 0)

    def outside(self, step: Span) -> int:
        """Returns the nanoseconds of a step outside compiled code."""
        return sum(length for number, length in self.pieces(step) if not self.compiled[number])

    def shares(self, steps: Sequence[Span], step_ms: float) -> dict[str, float]:
        """Returns PHASES -> share of the fastest step, without the profiler's cost. Slower steps were disturbed."""
        step = min(steps, key=lambda span: span.stop - span.start)
        pieces = list(self.pieces(step))
        longer = sum(length for _, length in pieces) - 1e6 * step_ms
        events = sum(self.events[number] for number, _ in pieces)
        each = min(max(longer / max(events, 1), 0.0), 1e3 * MOST_US)
        spent = dict.fromkeys(self.phases, 0.0)
        for number, length in pieces:
            spent[self.phases[number]] += length - min(each * self.events[number], MOST_SHARE * length)
        return compute_shares(spent)


def split_device_time(events: Sequence[Any], timeline: Timeline, steps: Sequence[Span]) -> dict[str, float]:
    """Returns PHASES -> share of these steps by the work of a CUDA device. `other` includes its idle time.

    A kernel belongs to the phase that launched it.
    """
    cpu = torch.autograd.DeviceType.CPU
    launched = {event.correlation_id(): event.start_ns() for event in events if event.device_type() == cpu}
    spent = Counter[str]()
    first, last = steps[0].start, steps[-1].stop
    for event in events:
        at = launched.get(event.correlation_id(), -1)
        if event.device_type() != cpu and not event.is_user_annotation() and first <= at < last:
            spent[timeline.phase(at)] += event.duration_ns()
    whole = sum(step.stop - step.start for step in steps)
    spent["other"] += max(whole - spent.total(), 0)
    return compute_shares(spent)


def compute_shares(spent: "Counter[str] | dict[str, float]") -> dict[str, float]:
    """Returns PHASES -> share of the whole.

    Example:
        >>> compute_shares({"mlp": 3.0, BACKWARD: 1.0})["mlp"], compute_shares({"mlp": 3.0, BACKWARD: 1.0})["other"]
        (0.75, 0.25)
    """
    whole = sum(spent.values())
    known = {phase: float(spent.get(phase, 0.0)) for phase in PHASES}
    known["other"] += whole - sum(known.values())
    return {phase: value / whole if whole else 0.0 for phase, value in known.items()}
