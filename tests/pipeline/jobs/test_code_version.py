"""What a run records about its code."""

import functools
import subprocess
from pathlib import Path

import pytest

from pipeline.jobs import code_version
from pipeline.jobs.code_version import CodeVersion
from pipeline.jobs.training.rank import main
from pipeline.jobs.training.train import note_changes
from pipeline.processes import build
from tests.homes import open_smoke


def test_a_commit_is_marked_for_changed_code_but_not_for_a_changed_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        found = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    monkeypatch.setattr(code_version, "PACKAGES", tmp_path)
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
    monkeypatch.setattr(code_version, "PACKAGES", tmp_path)
    assert code_version.read_commit() == "unknown"


def note(folder: Path, code: CodeVersion) -> None:
    note_changes(open_smoke(), folder, code)


def test_a_run_notes_every_version_of_the_code_that_trains_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Uncommitted changes too."""
    versions = [("a1", "s1"), ("a1", "s1"), ("a1+", "s2"), ("a1+", "s3"), ("b2", "s1")]
    codes = [CodeVersion(commit=commit, sources=sources, lock_hash="l") for commit, sources in versions]
    for code in codes:
        note(tmp_path, code)
    assert list(code_version.noted_code(tmp_path)) == codes[1:]
    assert code_version.trained_by(tmp_path).commit == "a1, a1+, b2"
    assert len(caplog.messages) == 3
    assert caplog.messages[0] == (
        "the code has changed: the training began under a1 (sources s1) and now uses a1+ (sources s2)"
    )


def test_the_sources_are_those_that_ranks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of a Ray cluster has no other ones, and a test changes no training."""
    monkeypatch.setattr(build, "PACKAGES", tmp_path)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "x.py").write_text("1")
    found = [build.hash_sources()]
    for room in ("tests", "flows", "pipeline"):
        (tmp_path / room).mkdir(exist_ok=True)
        (tmp_path / room / "y.py").write_text("1")
        found.append(build.hash_sources())
    assert found[0] == found[1] == found[2] != found[3]


def test_the_code_of_the_ranks_is_that_which_their_server_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files may have changed since, by an update of the checkout or a commit."""
    read = functools.cache(code_version.read_code.__wrapped__)
    monkeypatch.setattr(main, "read_code", read)
    monkeypatch.setattr(
        main, "read_build", functools.cache(build.read_build.__wrapped__)
    )  # or later tests get this one
    monkeypatch.setattr(build, "PACKAGES", tmp_path)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "x.py").write_text("1")
    imported = build.hash_sources()
    main.preload()
    (tmp_path / "pipeline" / "x.py").write_text("2")
    assert build.hash_sources() != imported
    assert read().sources == imported


@pytest.mark.parametrize(("sources", "commit"), [("here", code_version.read_code().commit), ("other", "unknown")])
def test_a_machine_without_git_has_the_commit_of_the_same_sources_here(
    tmp_path: Path, sources: str, commit: str
) -> None:
    text = code_version.read_code().sources if sources == "here" else sources
    note(tmp_path, CodeVersion(commit="unknown", sources=text, lock_hash="unknown"))
    assert code_version.trained_by(tmp_path).commit == commit


def test_a_run_that_does_not_name_its_code_gets_no_other(tmp_path: Path) -> None:
    assert code_version.trained_by(tmp_path).commit == "unknown"
