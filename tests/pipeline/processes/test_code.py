"""Files carry the version of the code that made them: another source or library has another one."""

from pathlib import Path

import pytest

from pipeline.processes import code


def test_any_source_and_library_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "PACKAGES", tmp_path)
    versions = {"numpy": "2"}
    monkeypatch.setattr(code, "version", versions.__getitem__)
    for name in ("a/b/one.py", "a/two.py", "other/three.py", "a/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")

    def now() -> str:
        return code.hash_code(("a",), ("numpy",))

    first = now()
    assert first == now()
    for name, other in (("other/three.py", False), ("a/notes.md", False), ("a/b/one.py", True), ("a/new.py", True)):
        before = now()
        (tmp_path / name).write_text("x = 2\n")
        assert (now() != before) is other, name
    (tmp_path / "a/new.py").unlink()
    (tmp_path / "a/b/one.py").write_text("x = 1\n")
    assert now() == first
    versions["numpy"] = "3"
    assert now() != first
