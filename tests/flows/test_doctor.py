"""The doctor names every fault of an installation, with the remedy."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from flows import doctor

GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def wrong(checks: list[doctor.Check]) -> list[tuple[str, str, str]]:
    return [(check.name, check.found, check.remedy) for check in checks if not check.ok]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"fbgemm-gpu": "1.8.0"}, [("fbgemm", "fbgemm-gpu 1.8.0, fbgemm-gpu-cpu 1.8.0", "Both builds own the module fbgemm_gpu; keep one. Run `make clean setup`.")]),
        ({"fbgemm-gpu-cpu": "1.4.0"}, [("fbgemm", "fbgemm-gpu-cpu 1.4.0", "fbgemm-gpu-cpu (or fbgemm-gpu with CUDA) 1.8.0 is needed. Run `make clean setup`.")]),
        ({"torch": "2.9.0"}, [("torch", "2.9.0", "torch 2.13.0 is needed. Run `make clean setup`.")]),
    ],
)  # fmt: skip
def test_versions(change, expected):
    assert wrong(doctor.versions(GOOD | change)) == expected


def test_a_missing_fbgemm():
    assert wrong(doctor.versions({"torch": "2.13.0", "torchrec": "1.8.0"}))[0][:2] == ("fbgemm", "absent")


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 10, 1), False), ((3, 11, 0), True), ((3, 13, 9), True), ((3, 14, 0), False)]
)
def test_python(version, ok):
    assert doctor.python_version(version).ok is ok


def test_a_module_that_breaks_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "wrong_abi.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.importable("wrong_abi", "fbgemm was built for another torch.")
    assert (found.ok, found.found) == (False, "ImportError: undefined symbol: _ZN3c10")
    assert found.remedy == "fbgemm was built for another torch. Run `make clean setup`."


def test_a_broken_module_is_named_among_others(tmp_path, monkeypatch):
    (tmp_path / "wrong_abi.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert wrong(doctor.all_importable({"json": "json is broken.", "csv": "csv is broken."})) == []
    [[name, found, remedy]] = wrong(doctor.all_importable({"json": "json is broken.", "wrong_abi": "Rebuild it."}))
    assert (name, found) == ("import wrong_abi", "ImportError: undefined symbol: _ZN3c10")
    assert remedy.startswith("Rebuild it.")


def test_a_missing_module_is_named():
    assert (
        doctor.importable("psutil_is_gone", "MLflow's system metrics need it.").found
        == "ModuleNotFoundError: No module named 'psutil_is_gone'"
    )


def test_a_folder_that_cannot_be_written():
    found = doctor.writable("home", Path("/proc/nowhere/home"), "Set DLRM_HOME.")
    assert not found.ok
    assert found.remedy == "Set DLRM_HOME."
    assert found.found.startswith("/proc: ")


def test_a_full_disk(tmp_path):
    assert doctor.space("disk", tmp_path, 2**60, "Free some space.").remedy == "Free some space."


def test_a_missing_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nic7")
    assert "'nic7' is absent" in doctor.loopback().remedy


def test_a_run_at_work_is_shown(tmp_path):
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    with FileLock(tmp_path / "runs" / "demo-1" / "lock"):
        assert [check.name for check in doctor.locked_runs(tmp_path)] == ["run demo-1"]
    assert doctor.locked_runs(tmp_path) == []


def test_a_bad_filter_in_a_config_is_shown(tmp_path):
    (tmp_path / "bad.yaml").write_text(f"base: {doctor.ROOT}/configs/smoke.yaml\nfilter: '1=1; drop table x'\n")
    found = doctor.configuration(str(tmp_path / "bad.yaml"))
    assert not found.ok
    assert found.found.startswith("filter '1=1; drop table x': expected comparisons of columns with constants")


def test_another_python_is_named_alone(tmp_path, monkeypatch, capsys):
    """Without the packages every check would fail, and its remedy would remove a sound environment."""
    absent = ("no_such_package",)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    found = doctor.find_other_python(tmp_path, absent)
    assert (found.ok, found.remedy) == (False, "Run this with the project's Python: .venv/bin/python -m flows.doctor.")
    assert sys.executable in found.found
    assert doctor.find_other_python() is None
    monkeypatch.setattr(doctor, "find_other_python", lambda: found)
    assert doctor.main([]) == 1
    [check] = json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
    assert check["remedy"] == found.remedy


def test_an_old_python_is_named_without_a_traceback():
    """What it imports first must be readable for Python 3.9."""
    tree = ast.parse((doctor.ROOT / "flows" / "__init__.py").read_text(), feature_version=(3, 9))
    assert [node.names[0].name for node in tree.body if isinstance(node, ast.Import)] == ["sys"]
    script = "import sys; sys.version_info = (3, 9, 18); import flows.doctor"
    done = subprocess.run([sys.executable, "-c", script], cwd=doctor.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {sys.executable}: expected Python 3.11, 3.12 or 3.13, got 3.9.18. "
        "Use .venv/bin/python, which `make setup` makes.\n",
    )


@pytest.mark.nightly
def test_this_installation_is_sound(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    code = doctor.main(["configs/demo.yaml"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (code, result["status"], result.get("error")) == (0, "ok", None)
