"""Processes of one job compute with the same code and packages."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.processes import build
from pipeline.processes.build import Build, require_same

ONE = Build(host="a", sources="s1", lock="l1", versions={"python": "3.11.9", "torch": "2.6.0+cpu", "numpy": "2.1"})


def other(**changes: Any) -> Build:
    return ONE.model_copy(update={"host": "b", **changes})


@pytest.mark.parametrize(
    ("build", "want", "got"),
    [
        (other(sources="s2"), "sources s1", "sources s2"),
        (other(lock="l2"), "lock file l1", "lock file l2"),
        (other(versions=ONE.versions | {"python": "3.12.1"}), "python 3.11.9", "python 3.12.1"),
        (other(versions=ONE.versions | {"torch": "2.7.0+cpu"}), "torch 2.6.0", "torch 2.7.0"),
        (other(versions={"python": "3.11.9", "torch": "2.6.0"}), "numpy 2.1", "numpy none"),
        (other(versions=ONE.versions | {"numba": "0.61"}, lock="l3"), "lock file l1, numba none", "lock file l3, numba 0.61"),
    ],
)  # fmt: skip
def test_a_process_with_another_build_is_refused(build: Build, want: str, got: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_same("rank 0", ONE, {"rank 1": ONE, "rank 2": build})
    assert str(refused.value) == (
        f"rank 2 on host b: expected the code and packages of rank 0 on host a, {want}, got {got}. "
        "Install the same commit and its requirements/ on all hosts."
    )


@pytest.mark.parametrize(
    "build",
    [
        other(),
        other(lock=None),  # a machine of a Ray cluster gets the sources alone
        other(versions=ONE.versions | {"torch": "2.6.0+cu124"}),
    ],
)
def test_builds_that_compute_the_same_agree(build: Build) -> None:
    require_same("rank 0", ONE, {"rank 1": build})
    require_same("rank 0", build, {"rank 1": ONE})


def test_each_room_is_found_where_it_is_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray unpacks each of them into a folder of its own."""
    here = build.hash_sources()
    monkeypatch.setattr(build, "PACKAGES", tmp_path)
    assert build.hash_sources() == here
    (tmp_path / "models").mkdir()
    assert build.hash_sources() != here
