"""What a running Prefect server needs for the flows: work pool, queues, deployments, automations. Safe to repeat.

Not a Prefect flow: it makes what flows run on.
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
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from pipeline.config.files import ROOT
from pipeline.errors import ConfigError, ContractError

POOL = "dlrm"
QUEUES = {"default": "everything but trainings", "training": "flows that train; as many at a time as its limit says"}
"""Queue of the pool -> what waits in it."""
HANDED = ("Pending", "Submitting", "InfrastructurePending")
"""Names of states in which a worker has the run and it has not begun."""
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")
WAITING = ("Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended")
"""Names of states in which a run is over, or in nobody's hands on purpose."""
SILENT, STUCK, CHAINED = "dlrm: runs that fell silent", "dlrm: runs that never began", "dlrm: train after ingest"


class Settings(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What can be chosen when deploying."""

    trainings: PositiveInt = 1
    """Runs of the queue `training` at a time; the others wait. Two of one model never train at once."""
    chain: bool | None = None
    """Whether an ingest that has completed starts a training of its config. None leaves it as it is: off at first."""
    silent_seconds: int = Field(default=90, ge=10)
    """A run without a sign of life for so long is marked CRASHED; three heartbeats."""
    pending_seconds: int = Field(default=600, ge=10)
    """A run that was handed to a worker and has not begun after so long is marked CRASHED."""


def automations(settings: Settings, training: Any) -> list[AutomationCore]:
    """What the server does by itself.

    Args:
        training: Id of the deployment that an ingest starts.
    """
    return [
        AutomationCore(
            name=SILENT,
            description="A run whose worker and process are gone gives no heartbeat; it is marked, its slot is freed.",
            trigger=_missing(
                ["heartbeat"], ["heartbeat", *ENDED, *WAITING], timedelta(seconds=settings.silent_seconds)
            ),
            actions=[_crashed(f"No heartbeat for {settings.silent_seconds} seconds: its process or machine is gone.")],
        ),
        AutomationCore(
            name=STUCK,
            description="A worker took the run and was gone before it began; it is marked, its slot is freed.",
            trigger=_missing(
                HANDED,
                # The server may lose an event where its database is locked; of heartbeats there are many.
                [*HANDED, "Running", "heartbeat", "Cancelling", *ENDED, *WAITING],
                timedelta(seconds=settings.pending_seconds),
            ),
            actions=[_crashed(f"PENDING for {settings.pending_seconds} seconds: the worker that took it is gone.")],
        ),
        AutomationCore(
            name=CHAINED,
            description="Trains the config of each deployed ingest that has completed; a finished training is skipped.",
            enabled=bool(settings.chain),
            trigger=EventTrigger(
                expect={"prefect.flow-run.Completed"},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                # The ingest inside an end-to-end run has no deployment, and its training follows anyway.
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
    """Fires for a run that had an event of the first kind and none of the second after it."""
    return EventTrigger(
        after={f"prefect.flow-run.{name}" for name in after},
        expect={f"prefect.flow-run.{name}" for name in expected},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def _crashed(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, message=message)


def _same(*names: str) -> dict[str, Any]:
    """Parameters as the run had them that sets the automation off; none are an empty mapping."""
    templates = {name: f"{{{{ flow_run.parameters.{name} | default({{}}, true) | tojson }}}}" for name in names}
    return {
        name: {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": template}}
        for name, template in templates.items()
    }


def deploy(settings: Settings) -> list[str]:
    """Makes or updates everything on the server that PREFECT_API_URL names; what it did, line by line.

    Raises:
        ConfigError: If no server is named, or Prefect refuses the deployments.
    """
    if not PREFECT_API_URL.value():
        remedy = "Start one with `make ui` and export PREFECT_API_URL=http://127.0.0.1:4200/api"
        raise ConfigError("PREFECT_API_URL", "the address of a running server", "none", remedy)
    with get_client(sync_client=True) as client:
        done = [_pool(client), *(_queue(client, name, settings) for name in QUEUES)]
        done += _deployments()
        training = client.read_deployment_by_name("train/after-ingest").id
        done += [_automation(client, one, settings) for one in automations(settings, training)]
    return done


def _pool(client: SyncPrefectClient) -> str:
    """The work pool; one that is there, of whatever kind, is left as it is."""
    try:
        kind = client.read_work_pool(POOL).type
    except ObjectNotFound:
        kind = client.create_work_pool(WorkPoolCreate(name=POOL, type="process")).type
    return f"work pool {POOL} ({kind})"


def _queue(client: SyncPrefectClient, name: str, settings: Settings) -> str:
    limit = settings.trainings if name == "training" else None
    place, body = {"work_pool_name": POOL}, {"description": QUEUES[name], "concurrency_limit": limit}
    try:
        client.request(
            "PATCH", "/work_pools/{work_pool_name}/queues/{name}", path_params=place | {"name": name}, json=body
        )
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 404:
            raise
        client.request("POST", "/work_pools/{work_pool_name}/queues", path_params=place, json=body | {"name": name})
    return f"queue {name}, {limit or 'any number'} at a time"


def _deployments() -> list[str]:
    """`prefect deploy --all`, which reads prefect.yaml."""
    program = Path(sys.executable).parent / "prefect"
    done = subprocess.run(
        [str(program), "--no-prompt", "deploy", "--all"], cwd=ROOT, env=os.environ | {"PWD": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        reason = " ".join((done.stderr + done.stdout).split())[-500:]
        raise ConfigError("prefect.yaml", "deployments that the server takes", reason, "Correct it, then deploy again.")
    return [f"deployments of {ROOT / 'prefect.yaml'}"]


def _automation(client: SyncPrefectClient, wanted: AutomationCore, settings: Settings) -> str:
    """Made, or put in place of the one of that name."""
    found = client.read_automations_by_name(wanted.name)
    if found and (wanted.name != CHAINED or settings.chain is None):  # what was switched in the UI stays so
        wanted = wanted.model_copy(update={"enabled": found[0].enabled})
    if found:
        client.update_automation(found[0].id, wanted)
    else:
        client.create_automation(wanted)
    return f"automation '{wanted.name}' ({'on' if wanted.enabled else 'off'})"


def parse(words: Sequence[str]) -> Settings:
    """Settings from key=value words.

    Raises:
        ConfigError: If a word is none of them; names it.
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
    """Deploys, says what it did and prints, last, one JSON object."""
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
    sys.exit(main(sys.argv[1:]))
