"""`make setup` never harms an environment that works, and the installed package needs no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_an_environment_is_replaced_when_its_lock_changes_and_no_process_runs_from_it(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "requirements" / "environment.sh", tmp_path / "requirements")
    lock, environment = tmp_path / "requirements" / "test.lock", tmp_path / ".venv"
    lock.write_text("# no packages\n")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "precious").touch()
    environment.symlink_to(linked)

    def setup() -> subprocess.CompletedProcess[str]:
        words = ["make", "setup", "LOCK=requirements/test.lock", f"PYTHON={sys.executable}"]
        clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "VENV", "EXTRAS")}
        return subprocess.run(words, cwd=tmp_path, env=clean | {"PIP_NO_INDEX": "1"}, capture_output=True, text=True)

    assert setup().returncode == 0
    assert (linked / "precious").exists()
    assert not environment.is_symlink()
    pip = subprocess.run([environment / "bin" / "pip", "--version"], capture_output=True, text=True, check=True)
    assert str(environment) in pip.stdout
    first = environment.stat().st_ino

    os.utime(lock)  # as a checkout of another branch and back does
    assert setup().returncode == 0
    assert environment.stat().st_ino == first

    lock.write_text("no-such-package==1\n")
    with subprocess.Popen([environment / "bin" / "python", "-c", "input()"], stdin=subprocess.PIPE) as process:
        refused = setup()
        process.communicate(b"\n")
    assert refused.returncode != 0
    assert f"process {process.pid} runs from .venv" in refused.stderr
    assert setup().returncode != 0  # there is no such package
    assert environment.stat().st_ino == first
    assert (environment / "bin" / "python").exists()


@pytest.mark.nightly
def test_an_environment_that_a_process_runs_from_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "requirements" / "environment.sh", tmp_path / "requirements")
    venv.create(tmp_path / ".venv", symlinks=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "VENV")}

    def remove() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "clean"], cwd=tmp_path, env=clean, capture_output=True, text=True)

    python = tmp_path / ".venv" / "bin" / "python"
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        refused = remove()
        process.communicate(b"\n")
    assert refused.returncode != 0
    assert f"process {process.pid} runs from .venv" in refused.stderr
    assert python.exists()
    assert remove().returncode == 0
    assert not (tmp_path / ".venv").exists()


@pytest.mark.nightly
def test_an_installed_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    """Its dependencies come from this environment, and nothing from the checkout."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    assert any(name.endswith("configs/smoke.yaml") for name in zipfile.ZipFile(wheel).namelist())
    shutil.rmtree(source)
    environment, folder = tmp_path / "environment", tmp_path / "work"
    folder.mkdir()
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True, capture_output=True)
    scheme = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", vars=scheme))
    dependencies = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLRM_", "PYTHON", "PREFECT_", "MLFLOW_"))
    }

    def dlrm(*words: str) -> str:
        command = [environment / "bin" / "dlrm", *words]
        done = subprocess.run(command, cwd=folder, env=clean | {"HOME": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "wrote configs/smoke.yaml" in dlrm("examples")
    assert '"status": "ok"' in dlrm("end_to_end", "configs/smoke.yaml", "training.world_size=1")
    assert (folder / ".dlrm" / "mlflow" / "mlflow.db").exists()
