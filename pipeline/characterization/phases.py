"""Where the time of a step goes: by phase, and by whether compiled code or the Python interpreter has it.

A few steps are made under torch.profiler, while the parts of the model note when they begin and end. A part of the
backward pass belongs to the phase whose forward pass made it, which autograd's sequence numbers tell.

torch.profiler costs some microseconds an event, more than many operators take. Nearly all of it lies inside of the
events, so the time between them, which is Python's, is measured as it is. From phases it is taken off: the steps are
longer with it than without by so much an event.
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

from pipeline.characterization.results import PHASES

BACKWARD = "backward"
"""The backward pass between the operators that it is made of; not a phase."""
NODE = "autograd::engine::evaluate_function: "
COLLECTIVES = ("c10d::", "gloo:", "nccl:", "record_param_comms")
COMPILED_NODE = re.compile(r"Backward\d+$|^torch::|^CompiledFunctionBackward$|^CopySlices$|^Graph")
COMPILED_REGIONS = ("CompiledFunction", "Torch-Compiled Region")
"""What torch.compile made: what is inside counts as compiled."""
MOST_US = 10.0
"""More than an event of torch.profiler ever costs, in microseconds."""
MOST_SHARE = 0.5
"""Of a stretch of time that is put down to the profiler: there was work in it."""


class StepPart(NamedTuple):
    """A call whose time is noted."""

    owner: Any
    """What has the method: an object, a class or a module."""
    method: str
    phase: str | None
    """One of PHASES, BACKWARD, or None: as what calls it."""
    compiled: bool = False
    """Whether it waits or works outside of the interpreter, where torch.profiler sees nothing of it."""


class Span(NamedTuple):
    """A stretch of time, in nanoseconds of the clock."""

    start: int
    stop: int
    phase: str | None
    compiled: bool = False
    noted: bool = False
    """Whether torch.profiler noted it."""


class StepSplit(NamedTuple):
    """Where the time of a step goes."""

    shares: dict[str, float]
    """PHASES -> share of a step; they add up to 1."""
    outside_ms: float
    """Of a step, in the interpreter; the median."""


def split_step(
    step: Callable[[], None],
    parts: Sequence[StepPart],
    steps: int,
    step_ms: float,
    device: torch.device,
    meet: bool = False,
) -> StepSplit:
    """Makes some steps and says where their time goes.

    Args:
        step: Makes one. Called by all ranks alike.
        parts: What steps are made of.
        step_ms: What a step takes without being looked at.
        meet: Whether a backward pass ends with waiting for the gradients of other ranks.
    """
    spans: list[Span] = []
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    with profile(activities=activities, acc_events=True) as profiler:
        step()  # the profiler's first events take longer
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
    """Calls of these parts are noted inside; afterwards they are as they were."""
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
    """What torch.profiler saw on the threads that make the steps: operators, and parts of the backward pass."""
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
    """Of each backward pass, what comes behind its last operator: there it waits for gradients of other ranks."""
    for span in noted_spans:
        if span.phase == BACKWARD:
            inside = [one.stop for one in seen if span.start <= one.start and one.stop <= span.stop]
            yield Span(max(inside, default=span.start), span.stop, "communication", compiled=True)


class Timeline:
    """Spans inside one another, cut where one begins or ends: what goes on at any time is what began last."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.starts: list[int] = []
        self.phases: list[str] = []
        self.compiled: list[bool] = []
        self.events: list[int] = []
        """Events that torch.profiler noted at the beginning of each piece."""
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
        """The phase at a time."""
        number = bisect_right(self.starts, at) - 1
        return self.phases[number] if number >= 0 else "other"

    def pieces(self, step: Span) -> Iterator[tuple[int, int]]:
        """(number, nanoseconds) of the pieces of a step."""
        first = bisect_right(self.starts, step.start) - 1
        for number in range(max(first, 0), len(self.starts)):
            start = max(self.starts[number], step.start)
            if start >= step.stop:
                return
            stop = self.starts[number + 1] if number + 1 < len(self.starts) else step.stop
            yield number, max(min(stop, step.stop) - start, 0)

    def outside(self, step: Span) -> int:
        """Nanoseconds of a step in which nothing compiled goes on."""
        return sum(length for number, length in self.pieces(step) if not self.compiled[number])

    def shares(self, steps: Sequence[Span], step_ms: float) -> dict[str, float]:
        """PHASES -> share of the fastest of these steps, without what the profiler took; others met something else."""
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
    """PHASES -> share of these steps, by what a CUDA device works on; `other` has the time in which it has no work.

    What it works on belongs to the phase in which it was launched.
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
    """PHASES -> share of the whole.

    Example:
        >>> compute_shares({"mlp": 3.0, BACKWARD: 1.0})["mlp"], compute_shares({"mlp": 3.0, BACKWARD: 1.0})["other"]
        (0.75, 0.25)
    """
    whole = sum(spent.values())
    known = {phase: float(spent.get(phase, 0.0)) for phase in PHASES}
    known["other"] += whole - sum(known.values())
    return {phase: value / whole if whole else 0.0 for phase, value in known.items()}
