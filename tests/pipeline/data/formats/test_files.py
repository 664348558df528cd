"""Files that a configuration names."""

from pathlib import Path

import pytest

from pipeline.data.formats.files import find_files, stamp
from pipeline.errors import ConfigError


def test_files_by_path_glob_or_several(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "deep/er/c.csv", "x[1].csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    assert find_files("b.csv", tmp_path, "w") == [tmp_path / "b.csv"]
    assert find_files(str(tmp_path / "b.csv"), Path("/nowhere"), "w") == [tmp_path / "b.csv"]
    assert find_files("?.csv", tmp_path, "w") == [tmp_path / "a.csv", tmp_path / "b.csv"]
    assert find_files("deep/**/*.csv", tmp_path, "w") == [tmp_path / "deep/er/c.csv"]
    assert find_files(["b.csv", "*.csv"], tmp_path, "w") == [tmp_path / name for name in ("a.csv", "b.csv", "x[1].csv")]
    assert find_files("x[1].csv", tmp_path, "w") == [tmp_path / "x[1].csv"]
    odd = tmp_path / "root[2]"
    odd.mkdir()
    (odd / "a.csv").write_text("x\n")
    assert find_files("*.csv", odd, "w") == [odd / "a.csv"]  # brackets in the root are not a pattern


def test_no_files_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError) as error:
        find_files(["*.csv", "no.parquet"], tmp_path, "source.path")
    assert str(error.value) == (
        "source.path: expected at least one file, got none at '*.csv, no.parquet'. "
        "Correct the path, or put the data there."
    )


def test_a_stamp_detects_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = stamp(tmp_path / "a")
    assert stamp(tmp_path / "a") == before
    (tmp_path / "a").write_text("xy")
    assert stamp(tmp_path / "a") != before
