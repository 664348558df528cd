"""What a run records about its code."""

import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.jobs import code_version
from pipeline.jobs.training.train import note_changes


def test_a_commit_is_marked_for_changed_code_but_not_for_a_changed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        found = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    monkeypatch.setattr(code_version, "ROOT", tmp_path)
    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/report.md"):
        (tmp_path / name).write_text("first")
    git("add", ".")
    git("commit", "-m", "first")
    own = git("rev-parse", "HEAD")[:12]
    assert code_version.read_commit() == own
    (tmp_path / "docs" / "report.md").write_text("second")
    (tmp_path / "docs" / "figure.png").write_text("new")
    assert code_version.read_commit() == own
    (tmp_path / "code.py").write_text("second")
    assert code_version.read_commit() == own + "+"


def test_outside_of_git_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_version, "ROOT", tmp_path)
    assert code_version.read_commit() == "unknown"


def test_a_run_notes_every_version_of_the_code_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Uncommitted changes too. Code that nobody imports changes nothing."""
    root, folder = tmp_path / "root", tmp_path / "run"
    (root / "pipeline").mkdir(parents=True)
    (root / "tests").mkdir()
    folder.mkdir()
    monkeypatch.setattr(code_version, "ROOT", root)
    commits = ["a1", "a1+", "a1+", "b2"]
    monkeypatch.setattr(code_version, "read_commit", lambda: commits[0])
    workspace: Any = SimpleNamespace(console=SimpleNamespace(log=logging.getLogger("test")))
    (root / "pipeline" / "x.py").write_text("1")
    note_changes(workspace, folder)
    (root / "tests" / "test_x.py").write_text("1")
    note_changes(workspace, folder)
    assert len(code_version.noted_code(folder)) == 1
    assert caplog.messages == []
    for content in ("2", "3", "1"):
        commits.pop(0)
        (root / "pipeline" / "x.py").write_text(content)
        note_changes(workspace, folder)
    noted = code_version.noted_code(folder)
    assert len(noted) == 4
    assert noted[0].sources == noted[3].sources
    assert len({one.sources for one in noted}) == 3
    assert code_version.trained_by(folder).commit == "a1, a1+, b2"
    assert len(caplog.messages) == 3
    assert caplog.messages[0] == (
        f"the code has changed: the training began under a1 (sources {noted[0].sources}) and now uses "
        f"a1+ (sources {noted[1].sources})"
    )
