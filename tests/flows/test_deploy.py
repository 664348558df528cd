"""`dlrm deploy` against a real Prefect API. tests/flows/test_servers.py runs what it makes with real workers."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.settings import PREFECT_API_URL, PREFECT_PROFILES_PATH, temporary_settings

from flows import deploy
from flows.deployments import deployment, setup
from flows.runtime.environment import ENVIRONMENT
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def client(prefect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A client of a server without deployments. What a test makes there is removed."""
    monkeypatch.setenv("PREFECT_API_URL", prefect)
    monkeypatch.setenv("PREFECT_PROFILES_PATH", str(tmp_path / "profiles.toml"))
    monkeypatch.setenv("DLRM_HOME", str(tmp_path / "home"))
    with (
        temporary_settings({PREFECT_PROFILES_PATH: tmp_path / "profiles.toml"}),
        get_client(sync_client=True) as client,
    ):
        yield client
        for one in client.read_deployments():
            client.delete_deployment(one.id)
        for made in client.read_automations():
            client.delete_automation(made.id)
        for pool in client.read_work_pools():
            client.delete_work_pool(pool.name)


def config(folder: Path, name: str = "mine") -> str:
    """A config of one's own, somewhere on this machine."""
    path = folder / f"{name}.yaml"
    path.write_text(f"base: {ROOT}/configs/flights_daily.yaml\nname: {name}\n")
    return str(path)


def read(client: SyncPrefectClient, name: str) -> Any:
    return client.read_deployment_by_name(name)


@pytest.mark.slow
def test_a_config_is_scheduled_by_one_command(client, tmp_path):
    path = config(tmp_path)
    lines, result = deploy.run([path, "cron=0 5 * * *", "timezone=Europe/Berlin", "training.epochs=2"])
    found = read(client, "recurring/mine")
    assert (found.entrypoint, found.pull_steps, found.path) == ("flows.recurring.recurring", [], None)
    assert found.parameters == {"config": path, "overrides": {"training.epochs": 2}}
    assert (found.work_pool_name, found.work_queue_name) == ("dlrm", "training")
    assert found.job_variables["env"] == ENVIRONMENT
    [schedule] = found.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone, schedule.active) == ("0 5 * * *", "Europe/Berlin", True)
    assert re.fullmatch(r"0 5 \* \* \* Europe/Berlin, next \d{4}-\d\d-\d\d 05:00", result["schedules"][0])
    assert "stop it      dlrm deploy remove recurring/mine" in lines
    assert lines[-1].startswith("warning: no worker takes its runs")
    assert {one.name for one in client.read_automations()} >= {setup.SILENT, setup.STUCK, setup.AGAIN}
    assert deploy.run([])[1]["deployments"] == [
        {"deployment": "recurring/mine", "config": path, "schedules": result["schedules"]}
    ]
    assert deploy.run(["remove", "mine"])[1] == {"removed": "recurring/mine"}
    assert deploy.run(["list"]) == (
        ["nothing is deployed. Such as: dlrm deploy configs/mine.yaml"],
        {"deployments": []},
    )


@pytest.mark.nightly
def test_what_people_set_outlives_a_second_deploy_and_a_setup(client, tmp_path):
    path = config(tmp_path)
    deploy.run([path, "cron=0 5 * * *"])
    deploy.run(["setup", "trainings=3", "silent_seconds=120"])
    for name in ("recurring/mine", "train/train"):
        found = read(client, name)
        hourly = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(hours=1)))
        client.create_deployment_schedules(found.id, [hourly])
        variables = {"env": {**found.job_variables["env"], "MLFLOW_TRACKING_URI": "http://mlflow"}, "working_dir": "/x"}
        client.update_deployment(found.id, DeploymentUpdate(job_variables=variables))
        client.pause_deployment(found.id)
    [own] = [one for one in read(client, "recurring/mine").schedules if one.slug == deployment.SLUG]
    client.update_deployment_schedule(read(client, "recurring/mine").id, own.id, active=False)
    client.pause_automation(client.read_automations_by_name(setup.AGAIN)[0].id)
    for words in ([path, "cron=0 6 * * *"], [path], ["setup"], ["setup"]):
        lines, _ = deploy.run(words)
    assert "queue training, 3 at a time" in lines
    mine, standard = read(client, "recurring/mine"), read(client, "train/train")
    rules = {str(getattr(one.schedule, "cron", None) or one.schedule.interval): one.active for one in mine.schedules}
    assert rules == {"0 6 * * *": False, "1:00:00": True}  # the new time, still switched off; the other as it was
    assert [one.schedule.interval for one in standard.schedules] == [timedelta(hours=1)]
    for found in (mine, standard):
        assert found.paused
        assert found.job_variables == {
            "env": {**ENVIRONMENT, "MLFLOW_TRACKING_URI": "http://mlflow"},
            "working_dir": "/x",
        }
    assert not client.read_automations_by_name(setup.AGAIN)[0].enabled
    [silent] = client.read_automations_by_name(setup.SILENT)
    assert silent.trigger.within == timedelta(seconds=120)
    scheduled = [name for name, one in deployment.list_deployments(client).items() if one.schedules]
    assert scheduled == ["recurring/mine", "train/train"]  # setup itself schedules nothing


@pytest.mark.slow
def test_a_colleagues_deployment_is_not_replaced_without_a_word(client, tmp_path, monkeypatch):
    path, other = config(tmp_path), tmp_path / "elsewhere"
    other.mkdir()
    deploy.run([path])
    with pytest.raises(ConfigError, match=f"'recurring/mine' exists: it is of {deployment.owner()} and runs {path}"):
        deploy.run([config(other)])
    monkeypatch.setattr(deployment, "owner", lambda: "kim@host")
    with pytest.raises(ConfigError, match="name=NAME, or replace it with take_over=true"):
        deploy.run([path])
    assert read(client, "recurring/mine").parameters["config"] == path
    deploy.run([config(other), "take_over=true"])
    assert read(client, "recurring/mine").parameters["config"] == str(other / "mine.yaml")
    with pytest.raises(ConfigError, match="expected the name of one deployment, got 'nobody', 0 of them"):
        deploy.run(["remove", "nobody"])


@pytest.mark.nightly
def test_another_project_on_the_server_keeps_what_it_has(client, tmp_path):
    """Its deployments may have our names, but not our tag."""
    flow = client.create_flow_from_name("recurring")
    client.create_deployment(flow, "mine", entrypoint="theirs.py:flow", tags=["theirs"])
    with pytest.raises(ConfigError, match="'recurring/mine' exists: it is of nobody known and runs None"):
        deploy.run([config(tmp_path)])
    with pytest.raises(ConfigError, match="got 'recurring/mine', 0 of them"):
        deploy.run(["remove", "recurring/mine"])
    client.create_deployment(flow, "recurring", entrypoint="theirs.py:flow", tags=["theirs"])
    lines, _ = deploy.run(["setup"])
    assert any(line.endswith("left alone, of another project: recurring/recurring") for line in lines)
    assert read(client, "recurring/recurring").entrypoint == "theirs.py:flow"


@pytest.mark.slow
def test_a_config_of_the_project_is_found_in_any_checkout(client):
    deploy.run(["configs/smoke.yaml", "flow=end_to_end", "name=nightly"])
    assert read(client, "end-to-end/nightly").parameters == {"config": "configs/smoke.yaml"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cron=0 5 * *"], "argument 'cron': expected minute, hour, day of month, month and day of week, such as '0 5 * * *', got '0 5 * *'."),
        (["cron=0 5 * * *", "timezone=Mars"], "argument 'timezone': expected one such as Europe/Berlin, got 'Mars'."),
        (["flow=nothing"], "argument 'flow': expected one of backfill, backtest, "),
        (["flow=serve"], "argument 'flow': expected one of backfill, backtest, "),
        (["training.epoch=3"], "{path}, key 'training.epoch': expected a known key"),
        (["take_over=perhaps"], "argument 'take_over': expected a valid boolean"),
        (["crom=1"], "argument 'crom'"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_it_is_deployed(words, sentence, tmp_path):
    """No server is asked."""
    with pytest.raises(ConfigError) as refused:
        deploy.deploy_config(None, config(tmp_path), words)  # type: ignore[arg-type]
    assert str(refused.value).startswith(sentence.replace("{path}", str(tmp_path / "mine.yaml")))


def test_a_schedule_in_a_zone_with_summer_time_keeps_its_hour():
    """Prefect's own rules: 05:00 in Berlin is 04:00 or 03:00 in UTC."""
    schedule = CronSchedule(cron="0 5 * * *", timezone="Europe/Berlin")
    made = deployment.DeploymentSchedule(id="00000000-0000-0000-0000-000000000000", schedule=schedule, active=True)
    assert deployment.describe_schedule(made).endswith("05:00")
    assert deployment.describe_schedule(made, paused=True) == "0 5 * * * Europe/Berlin, switched off"


def test_an_action_comes_before_its_settings():
    with pytest.raises(ConfigError, match="a config, or one of setup, remove and list, first, got 'trainings=2'"):
        deploy.run(["trainings=2"])


def test_without_a_server_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert deploy.main([]) == 1
    assert (
        capsys.readouterr().err
        == "error: PREFECT_API_URL: expected the address of a running server, got none. Start one with `make ui`, or name another one's: export PREFECT_API_URL=http://HOST:PORT/api.\n"
    )
