"""Sets up a running Prefect server for the flows: work pool, queues, deployments and automations. Safe to repeat.

Not a Prefect flow: flows run on what it sets up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from flows.runtime.access import authenticated, require_server
from flows.runtime.console import TAG
from flows.runtime.environment import set_environment
from pipeline.config.files import ROOT, home_path
from pipeline.errors import ConfigError, ContractError

POOL = "dlrm"
QUEUES = {"default": "everything but trainings", "training": "flows that train, up to the queue's limit at a time"}
"""Queue of the pool -> description of its runs."""
HANDED = ("Pending", "Submitting", "InfrastructurePending")
"""States of a run that a worker has taken and not started."""
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")
WAITING = ("Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended")
"""States of a run that has ended, or that no worker is meant to hold."""
SILENT, STUCK, CHAINED = "dlrm: runs that fell silent", "dlrm: runs that never began", "dlrm: train after ingest"


class Settings(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Options of `flows.deploy`."""

    trainings: PositiveInt = 1
    """Maximum number of concurrent runs in the queue `training`. Two runs of one model never train at once."""
    chain: bool | None = None
    """Whether a completed ingest starts a training of its config. None keeps the setting, which is off at first."""
    silent_seconds: int = Field(default=90, ge=10)
    """A run without a heartbeat for this long is marked CRASHED. The default is three heartbeats."""
    pending_seconds: int = Field(default=600, ge=10)
    """A run that a worker took and did not start within this time is marked CRASHED."""


def automations(settings: Settings, training: Any) -> list[AutomationCore]:
    """Returns what the server does by itself.

    Args:
        training: Id of the deployment that a completed ingest starts.
    """
    return [
        AutomationCore(
            name=SILENT,
            description="Marks a run CRASHED when its heartbeats stop, and frees its slot. Its process is gone.",
            trigger=_missing(
                ["Running", "heartbeat"],  # a run may be killed before its first heartbeat has arrived
                ["heartbeat", *ENDED, *WAITING],
                timedelta(seconds=settings.silent_seconds),
            ),
            actions=[_crashed(f"No heartbeat for {settings.silent_seconds} seconds: its process or machine is gone.")],
        ),
        AutomationCore(
            name=STUCK,
            description="Marks a run CRASHED when its worker died before starting it, and frees its slot.",
            trigger=_missing(
                HANDED,
                # The server can lose an event while its database is locked. There are many heartbeats, so one arrives.
                [*HANDED, "Running", "heartbeat", "Cancelling", *ENDED, *WAITING],
                timedelta(seconds=settings.pending_seconds),
            ),
            actions=[_crashed(f"PENDING for {settings.pending_seconds} seconds: the worker that took it is gone.")],
        ),
        AutomationCore(
            name=CHAINED,
            description="Trains the config of each completed ingest deployment. A finished training is skipped.",
            enabled=bool(settings.chain),
            trigger=EventTrigger(
                expect={"prefect.flow-run.Completed"},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                # The ingest inside an end-to-end run has no deployment. Its training follows anyway.
                match_related=[
                    {"prefect.resource.role": "flow", "prefect.resource.name": "ingest"},
                    {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"},
                ],
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[RunDeployment(source="selected", deployment_id=training, parameters=_same("config", "overrides"))],
        ),
    ]


def _missing(after: Sequence[str], expected: Sequence[str], within: timedelta) -> EventTrigger:
    """Fires for a run of ours with an event in `after` that is not followed by one in `expected` in time.

    Runs of other projects on the same server may send no heartbeats, and are left alone.
    """
    return EventTrigger(
        after={f"prefect.flow-run.{name}" for name in after},
        expect={f"prefect.flow-run.{name}" for name in expected},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def _crashed(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, message=message)


def _same(*names: str) -> dict[str, Any]:
    """Passes on parameters of the run that triggers the automation. A missing one becomes an empty mapping."""
    templates = {name: f"{{{{ flow_run.parameters.{name} | default({{}}, true) | tojson }}}}" for name in names}
    return {
        name: {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": template}}
        for name, template in templates.items()
    }


def deploy(settings: Settings) -> list[str]:
    """Creates or updates everything on the server at PREFECT_API_URL, or on that of this home.

    Returns:
        A line for each thing done.

    Raises:
        ConfigError: If there is no server, it takes no authentication of ours, or Prefect refuses the deployments.
    """
    home = home_path(".dlrm")
    with authenticated(require_server(home), home), get_client(sync_client=True) as client:
        done = [_pool(client), *(_queue(client, name, settings) for name in QUEUES)]
        done += _deployments()
        training = client.read_deployment_by_name("train/after-ingest").id
        done += [_automation(client, one, settings) for one in automations(settings, training)]
    return done


def _pool(client: SyncPrefectClient) -> str:
    """Creates the work pool. An existing one keeps its type."""
    try:
        kind = client.read_work_pool(POOL).type
    except ObjectNotFound:
        kind = client.create_work_pool(WorkPoolCreate(name=POOL, type="process")).type
    return f"work pool {POOL} ({kind})"


def _queue(client: SyncPrefectClient, name: str, settings: Settings) -> str:
    limit = settings.trainings if name == "training" else None
    try:
        queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        queue = client.create_work_queue(name, work_pool_name=POOL)
    client.update_work_queue(queue.id, description=QUEUES[name], concurrency_limit=limit)
    return f"queue {name}, {limit or 'any number'} at a time"


def _deployments() -> list[str]:
    """Runs `prefect deploy --all`, which reads prefect.yaml."""
    if not (ROOT / "prefect.yaml").exists():
        raise ConfigError(
            f"prefect.yaml in '{ROOT}'", "the project's file of deployments", "none",
            "Deploy from a checkout of the project; an installed package has no deployments.",
        )  # fmt: skip
    program = Path(sys.executable).parent / "prefect"
    done = subprocess.run(
        [str(program), "--no-prompt", "deploy", "--all"], cwd=ROOT, env=os.environ | {"PWD": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        reason = " ".join((done.stderr + done.stdout).split())[-500:]
        raise ConfigError("prefect.yaml", "deployments that Prefect accepts", reason, "Correct it, then deploy again.")
    return [f"deployments of {ROOT / 'prefect.yaml'}"]


def _automation(client: SyncPrefectClient, wanted: AutomationCore, settings: Settings) -> str:
    """Creates the automation, or replaces the one of that name."""
    found = client.read_automations_by_name(wanted.name)
    if found and (wanted.name != CHAINED or settings.chain is None):  # keep what was switched in the UI
        wanted = wanted.model_copy(update={"enabled": found[0].enabled})
    if found:
        client.update_automation(found[0].id, wanted)
    else:
        client.create_automation(wanted)
    return f"automation '{wanted.name}' ({'on' if wanted.enabled else 'off'})"


def parse(words: Sequence[str]) -> Settings:
    """Parses key=value words into settings.

    Raises:
        ConfigError: If a word is not a setting. It names the word.
    """
    values = {key: yaml.safe_load(text) for key, _, text in (word.partition("=") for word in words)}
    for key in values:
        if key not in Settings.model_fields:
            raise ConfigError(
                f"argument '{key}'", f"one of {', '.join(Settings.model_fields)}", f"'{key}'", "Correct it."
            )
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        expected = first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"argument '{first['loc'][0]}'", expected, f"{first['input']!r}", "Correct it.") from None


def main(words: Sequence[str]) -> int:
    """Deploys, prints what it did and, as the last line, one JSON object."""
    try:
        done = deploy(parse(words))
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        print(json.dumps({"status": "failed", "error": str(error)}))
        return 1
    print("\n".join(done))
    print(json.dumps({"status": "ok", "done": done}))
    return 0


if __name__ == "__main__":
    set_environment()
    sys.exit(main(sys.argv[1:]))
