"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config import load

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_config_for_own_data_is_valid(tmp_path):
    (tmp_path / "mine.yaml").write_text(block("yaml"), encoding="utf-8")
    config = load(tmp_path / "mine.yaml")
    assert config.name == "mine"
    assert config.features.sparse[1].pooling == "mean"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)`?", README))
    assert named <= targets, named - targets
    assert {"demo", "test", "test-slow", "test-all", "setup", "ui", "check", "help"} <= targets


def test_modules_and_files_exist():
    for name in re.findall(r"python -m flows\.(\w+)", README):
        assert (ROOT / "flows" / f"{name}.py").exists()
    for name in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(configs/\w+\.yaml)`", README):
        assert (ROOT / name).exists() or name == "configs/mine.yaml"


def test_deployments_named_are_declared():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    declared = {f"{d['entrypoint'].split(':')[1].replace('_', '-')}/{d['name']}" for d in deployments}
    assert (
        set(
            re.findall(
                r"`((?:ingest|enrich|suggest|train|recurring|backfill|compare|preprocess|placement|characterize|size|checkpoint|features|layout|promote|rollback|register|replay|report|score|sweep|release|end-to-end)/[\w-]+)`",
                README,
            )
        )
        == declared
    )


@pytest.mark.usefixtures("smoke")
def test_the_example_of_scoring_runs(home):
    code = block("python").replace(".dlrm/", f"{home}/").replace("models:/demo@", "models:/smoke@")
    assert str(home) in code
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "probability" in done.stdout
