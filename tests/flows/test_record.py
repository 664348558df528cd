"""What a run records about its code."""

import subprocess
from pathlib import Path

import pytest

from pipeline.jobs import code_version


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
