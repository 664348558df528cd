"""How many trials a search of a suggested config makes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config import load
from pipeline.config.draft import load_draft
from pipeline.errors import ConfigError
from pipeline.jobs.console import Console
from pipeline.jobs.features.suggest import DraftJob
from pipeline.jobs.search import tune as tuning
from tests.homes import CONFIG


class Search:
    """Stands in for sweeps. Each trial takes some minutes of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
        self.clock, self.minutes, self.asked = 0.0, minutes, [0]
        self.spaces: list[Any] = []
        monkeypatch.setattr(tuning, "run_sweep", self.run)
        monkeypatch.setattr(tuning, "ingest_days", lambda *words: None)
        monkeypatch.setattr(tuning, "_write_best", lambda written, result: result)
        monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: self.clock))

    def run(self, workspace: Any, snapshot_id: int | None, force: bool) -> dict[str, Any]:
        sweep = workspace.config.sweep
        self.clock += 60.0 * self.minutes * (sweep.trials - self.asked[-1])  # a sweep goes on where it ended
        self.asked.append(sweep.trials)
        self.spaces.append(sweep.space)
        return {"trials": {"complete": sweep.trials}}


def written(validates: bool = True, **overrides: Any) -> Any:
    draft = load_draft(CONFIG, overrides)
    split = SimpleNamespace(split=SimpleNamespace(validates=validates))
    return SimpleNamespace(job=DraftJob(draft, Console(), overrides), suggestion=split, path=Path(CONFIG))


@pytest.mark.parametrize(
    ("trials", "minutes", "made"),
    [(3, None, 3), (None, 10.0, 2), (1, 10.0, 1), (9, 10.0, 2), (None, 1.0, 1)],
)
def test_a_trial_begins_only_if_it_will_end_in_time(monkeypatch, trials, minutes, made):
    """A trial takes four minutes. One is made in any case: there would be no best otherwise."""
    search = Search(monkeypatch, 4.0)
    assert tuning.tune(written(), trials, minutes) == {"trials": {"complete": made}}
    assert search.asked[-1] == made


def test_what_the_command_names_is_not_searched(monkeypatch):
    search = Search(monkeypatch, 1.0)
    tuning.tune(written(**{"model.dropout": 0.1}), 1, None)
    assert search.spaces[0].keys() == tuning.search_space(load(CONFIG)).keys() - {"model.dropout"}


def test_a_search_needs_rows_to_judge_by():
    with pytest.raises(ConfigError, match=r"suggest, trials: expected validation rows, got a split without them"):
        tuning.tune(written(validates=False), None, 5.0)
