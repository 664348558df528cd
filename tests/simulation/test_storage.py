"""Simulated schedules of checkpoints, tables and registrations: no promise is broken, and a seed is a schedule."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation import checkpoints, days, registry, tables
from tests.simulation.outcome import Outcome, scratch
from tests.simulation.world import BrokenPromise

ROOT = Path(__file__).resolve().parents[2]


def play_all(side: str, play: Callable[[int], Outcome], seeds: range) -> Counter[str]:
    struck: Counter[str] = Counter()
    for seed in seeds:
        try:
            struck += play(seed).faults
        except Exception as error:
            pytest.fail(
                f"{type(error).__name__}: {error}. Repeat it: python -m tests.simulation side={side} seed={seed}"
            )
    return struck


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_a_loaded_checkpoint_is_the_newest_that_was_written_in_full(part: int) -> None:
    """Whatever is killed, cut, full or damaged, and nothing is left over."""
    struck = play_all("checkpoints", checkpoints.play, range(part * 50, part * 50 + 50))
    assert len(struck) == len(checkpoints.FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_every_committed_row_is_there_once_and_nothing_needed_goes(part: int) -> None:
    """Whatever a commit meets, whoever writes at the same time, and however wrong the clock is."""
    struck = play_all("tables", tables.play, range(part * 12, part * 12 + 12))
    assert len(struck) > 7


@pytest.mark.slow
def test_a_training_is_registered_once_and_an_alias_names_a_whole_version() -> None:
    """Whatever is killed or away, whoever else promotes, and however wrong the clock is."""
    struck = play_all("registry", registry.play, range(150))
    assert struck.keys() == set(registry.FAULTS)


@pytest.mark.slow
def test_each_closed_day_is_trained_on_and_judges_once_and_no_other_day_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes late, twice, by halves, of the future or not at all. `make simulate` plays forty days each."""
    monkeypatch.setattr(days, "DAYS", 12)
    struck = play_all("days", days.play, range(3, 6))
    assert len(struck) > 5


def test_an_error_without_effect_is_a_broken_promise() -> None:
    def die() -> None:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    for fail in (die, lambda: print("Traceback (most recent call last):", file=sys.stderr)):
        with pytest.raises(BrokenPromise, match="1 errors had no effect"), scratch():
            fail()


@pytest.mark.slow
def test_a_seed_repeats_its_schedule() -> None:
    """In another process, too."""
    command = [sys.executable, "-m", "tests.simulation", "side=tables", "seed=7"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    trace = tables.play(7).trace
    assert len(trace) > 2
    assert printed.splitlines() == trace
    for side in (checkpoints, registry):
        assert side.play(7).trace == side.play(7).trace
