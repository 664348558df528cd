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
        f"source.path: expected at least one file, got none at '{tmp_path}/*.csv, {tmp_path}/no.parquet'. "
        "Correct the path, or put the data there."
    )


def test_each_path_of_several_has_a_file(tmp_path: Path) -> None:
    """A glob beside others may match nothing yet. A name that is no file is a mistake, whatever the others have."""
    odd = tmp_path / "root[2]"
    (odd / "folder").mkdir(parents=True)
    (odd / "a.csv").write_text("x\n")
    assert find_files(["a.csv", "b*.csv"], odd, "w") == [odd / "a.csv"]
    for name in ("b.csv", "folder", "none/a.csv"):
        with pytest.raises(ConfigError, match=rf"expected at least one file, got none at '.*/{name}'\. Correct"):
            find_files(["a.csv", name, "b*.csv"], odd, "w")


def test_files_are_in_order_of_their_folders(tmp_path: Path) -> None:
    names = ["a/b.csv", "a-b/b.csv", "a.csv", "a/b/c.csv"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    assert find_files("**/*.csv", tmp_path, "w") == sorted(tmp_path / name for name in names)
    (tmp_path / "link.csv").symlink_to(tmp_path / "a/b.csv")
    assert find_files(["link.csv", "a/../a/b.csv"], tmp_path, "w") == [tmp_path / "a/b.csv"]


def test_a_stamp_detects_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = stamp(tmp_path / "a")
    assert stamp(tmp_path / "a") == before
    (tmp_path / "a").write_text("xy")
    assert stamp(tmp_path / "a") != before


@pytest.mark.parametrize(
    "hidden", ["_temporary/0/a.csv", "day=1/.a.csv.crc.csv", "_SUCCESS.csv", ".tmp/a.csv", "day=1/_committed/a.csv"]
)
def test_what_other_engines_hide_is_hidden(tmp_path: Path, hidden: str) -> None:
    for name in ("day=1/a.csv", hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    assert find_files("**/*.csv", tmp_path, "w") == [tmp_path / "day=1/a.csv"]
    assert find_files([hidden, "**/*.csv"], tmp_path, "w") == sorted([tmp_path / "day=1/a.csv", tmp_path / hidden])


def test_a_glob_may_name_what_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "_logs").mkdir()
    (tmp_path / "_logs/a.csv").write_text("x\n")
    (tmp_path / "_logs/_b.csv").write_text("x\n")
    assert find_files("_logs/*.csv", tmp_path, "w") == [tmp_path / "_logs/a.csv"]
    assert find_files("_l*/_*.csv", tmp_path, "w") == [tmp_path / "_logs/_b.csv"]


@pytest.mark.parametrize(
    ("mark", "kind"),
    [("_delta_log/0.json", "Delta"), ("metadata/v1.metadata.json", "Iceberg"), (".hoodie/hoodie.properties", "Hudi")],
)
@pytest.mark.parametrize("file", ["a.parquet", "day=1/hour=2/a.parquet", "data/day=1/a.parquet"])
def test_files_of_a_table_are_refused(tmp_path: Path, mark: str, kind: str, file: str) -> None:
    for name in (mark, file):
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text("x\n")
    with pytest.raises(
        ConfigError, match=rf"got data files of the {kind} table '.*/t'. Read it as a table with source\.table"
    ):
        find_files("t/**/*.parquet", tmp_path, "source.path")


@pytest.mark.parametrize("pattern", ["*.csv", "b.csv"])
def test_a_link_to_nothing_is_refused(tmp_path: Path, pattern: str) -> None:
    """As of git-annex or DVC, where the content was not fetched."""
    (tmp_path / "a.csv").write_text("x\n")
    (tmp_path / "b.csv").symlink_to(tmp_path / "gone/b.csv")
    with pytest.raises(
        ConfigError, match=r"expected files that are there, got the link '.*/b.csv' to none at '.*/gone/"
    ):
        find_files(["a.csv", pattern], tmp_path, "source.path")
