"""prefect.yaml is checked here, because Prefect silently ignores unknown keys."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig

from flows.runtime.environment import ENVIRONMENT
from pipeline.config import load
from pipeline.study.points.load import load_study

ROOT = Path(__file__).resolve().parent.parent
CONTENT = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
TRAINING = {
    "train", "end-to-end", "recurring", "backfill", "backtest", "sweep", "sharding", "characterize", "estimate",
    "replay", "release",
}  # fmt: skip
DEPLOYMENTS = {f"{d['entrypoint'].split('.')[-1].replace('_', '-')}/{d['name']}": d for d in CONTENT["deployments"]}


def test_top_level_keys_are_known():
    assert CONTENT.keys() <= {"name", "prefect-version", "build", "push", "pull", "definitions", "deployments"}


def test_the_named_deployments_exist():
    assert set(DEPLOYMENTS) == {
        "ingest/ingest",
        "enrich/enrich",
        "suggest/suggest",
        "train/train",
        "train/after-ingest",
        "checkpoint/checkpoint",
        "clean/clean",
        "features/features",
        "layout/layout",
        "preprocess/preprocess",
        "sharding/sharding",
        "characterize/characterize",
        "estimate/estimate",
        "recurring/recurring",
        "backfill/backfill",
        "backtest/backtest",
        "sweep/sweep",
        "release/release",
        "promote/promote",
        "rollback/rollback",
        "score/score",
        "consistency/consistency",
        "register/register",
        "replay/replay",
        "report/report",
        "end-to-end/end-to-end",
        "end-to-end/sample",
    }


def test_deployed_runs_have_the_environment_of_commands():
    for deployment in DEPLOYMENTS.values():
        assert deployment["work_pool"]["job_variables"]["env"] == ENVIRONMENT


def test_what_make_exports_has_the_values_of_commands():
    """MkDocs alone has a variable of its own."""
    exported = dict(re.findall(r"^export (\w+) = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert exported.pop("NO_MKDOCS_2_WARNING") == "1"
    assert exported == {name: ENVIRONMENT[name] for name in exported}
    assert len(exported) == 5


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployment_is_sound(name):
    deployment = DEPLOYMENTS[name]
    assert set(deployment) <= set(DeploymentConfig.model_fields), "a key that Prefect does not know"
    module, function = deployment["entrypoint"].rsplit(".", 1)  # which a worker imports from its own installation
    flow = getattr(importlib.import_module(module), function)
    assert flow.name == name.split("/")[0]
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    read = load_study if flow.name in ("characterize", "estimate") else load
    read(deployment["parameters"]["config"])
    assert deployment["work_pool"]["name"] == "dlrm"


def test_nothing_is_scheduled():
    """A team schedules its own configs. Generated data gets no new days."""
    assert not any(deployment.get("schedules") for deployment in DEPLOYMENTS.values())


def test_no_folder_of_a_machine():
    """An empty list: Prefect would otherwise add a step with the folder of whoever deploys."""
    assert CONTENT["pull"] == []


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_trainings_wait_for_each_other_and_all_send_heartbeats(name):
    place = DEPLOYMENTS[name]["work_pool"]
    assert place["work_queue_name"] == ("training" if name.split("/")[0] in TRAINING else "default")
    assert place["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
