"""Sets up a Prefect server for the flows: work pool, queues, automations and a deployment of each flow."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from flows.deployments.deployment import POOL, list_deployments, put_deployment, read_standard
from flows.runtime.console import TAG
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError

Options = TypeVar("Options", bound=BaseModel)
QUEUES = {"default": "everything but trainings", "training": "flows that train, up to the queue's limit at a time"}
"""Queue of the pool -> description of its runs."""
HANDED = ("Pending", "Submitting", "InfrastructurePending")
"""States of a run that a worker has taken and not started."""
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")
WAITING = ("Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended")
"""States of a run that has ended, or that no worker is meant to hold."""
SILENT, STUCK, CHAINED = "dlrm: runs that fell silent", "dlrm: runs that never began", "dlrm: train after ingest"
AGAIN = "dlrm: start crashed runs again"
AGAIN_SECONDS = 20
CHAIN_TARGET = "train/after-ingest"


class Settings(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Options of `dlrm deploy setup`."""

    trainings: PositiveInt | None = None
    """Maximum number of concurrent runs in the queue `training`. None keeps the setting, which is 1 at first. Two runs
    of one model never train at once."""
    chain: bool | None = None
    """Whether a completed ingest starts a training of its config. None keeps the setting, which is off at first."""
    silent_seconds: int | None = Field(default=None, ge=10)
    """A run without a heartbeat for this long is marked CRASHED; one beats every 30 seconds. None keeps the setting,
    which is 75 at first."""
    pending_seconds: int | None = Field(default=None, ge=10)
    """A run that a worker took and did not start within this time is marked CRASHED. None keeps the setting, which is
    600 at first."""


def automations(silent_seconds: float, pending_seconds: float) -> list[AutomationCore]:
    """Returns what the server does with runs whose process is gone. Arguments as of `Settings`."""
    return [
        AutomationCore(
            name=SILENT,
            description="Marks a run CRASHED when its heartbeats stop, and frees its slot. Its process is gone.",
            trigger=_missing(
                ["Running", "heartbeat"],  # a run may be killed before its first heartbeat has arrived
                ["heartbeat", *ENDED, *WAITING],
                timedelta(seconds=silent_seconds),
            ),
            actions=[_crashed(f"No heartbeat for {silent_seconds:.0f} seconds: its process or machine is gone.")],
        ),
        AutomationCore(
            name=STUCK,
            description="Marks a run CRASHED when its worker died before starting it, and frees its slot.",
            trigger=_missing(
                HANDED,
                # The server can lose an event while its database is locked. There are many heartbeats, so one arrives.
                [*HANDED, "Running", "heartbeat", "Cancelling", *ENDED, *WAITING],
                timedelta(seconds=pending_seconds),
            ),
            actions=[_crashed(f"PENDING for {pending_seconds:.0f} seconds: the worker that took it is gone.")],
        ),
        AutomationCore(
            name=AGAIN,
            description="Starts a CRASHED run again, once. It skips what is finished and resumes a training.",
            trigger=_missing(
                ["Crashed"],  # which a worker may report a second time, after seconds
                [*HANDED, "Running", "Cancelling", *WAITING, *(name for name in ENDED if name != "Crashed")],
                timedelta(seconds=AGAIN_SECONDS),
                first=True,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.SCHEDULED, name="AwaitingRetry", message="Its process was gone: it starts again."
                )
            ],
        ),
    ]


def chain(training: UUID) -> AutomationCore:
    """Returns what starts a training after each ingest.

    Args:
        training: Id of the deployment to run.
    """
    return AutomationCore(
        name=CHAINED,
        description="Trains the config of each completed ingest deployment. A finished training is skipped.",
        enabled=False,
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
    )


def _missing(after: Sequence[str], expected: Sequence[str], within: timedelta, first: bool = False) -> EventTrigger:
    """Fires for a run of ours with an event in `after` that is not followed by one in `expected` in time.

    Runs of other projects on the same server may send no heartbeats, and are left alone.

    Args:
        first: Only for a run of a deployment that has begun once. Runs inside it begin again with it.
    """
    match: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    related: list[dict[str, str | list[str]]] = [
        {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
    ]
    if first:
        match["prefect.run-count"] = "1"  # one that never began would fail to begin for ever
        related.append({"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"})
    return EventTrigger(
        after={f"prefect.flow-run.{name}" for name in after},
        expect={f"prefect.flow-run.{name}" for name in expected},
        match=ResourceSpecification(match),
        match_related=[ResourceSpecification(one) for one in related],
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


def prepare(client: SyncPrefectClient, settings: Settings) -> list[str]:
    """Creates or updates the work pool, its queues, and automations for runs whose process is gone.

    Returns:
        A line for each thing done.
    """
    done = [_pool(client), *(_queue(client, name, settings) for name in QUEUES)]
    seconds = [
        _seconds(client, name, given, default)
        for name, given, default in ((SILENT, settings.silent_seconds, 75), (STUCK, settings.pending_seconds, 600))
    ]
    return [*done, *(_automation(client, one) for one in automations(*seconds))]


def _seconds(client: SyncPrefectClient, name: str, given: int | None, default: int) -> float:
    """Returns the time of an automation: as given, as it is on the server, or the default."""
    found = client.read_automations_by_name(name) if given is None else []
    present = [one.trigger.within.total_seconds() for one in found if isinstance(one.trigger, EventTrigger)]
    return given or next(iter(present), default)


def set_up(client: SyncPrefectClient, settings: Settings) -> list[str]:
    """Prepares the server, and puts a deployment of each flow there. A completed ingest may then start a training.

    Returns:
        A line for each thing done.
    """
    done = [*prepare(client, settings), _put_standard(client)]
    training = client.read_deployment_by_name(CHAIN_TARGET)
    return [*done, _automation(client, chain(training.id), settings.chain)]


def _pool(client: SyncPrefectClient) -> str:
    """Creates the work pool. An existing one keeps its type."""
    try:
        kind = client.read_work_pool(POOL).type
    except ObjectNotFound:
        kind = client.create_work_pool(WorkPoolCreate(name=POOL, type="process")).type
    return f"work pool {POOL} ({kind})"


def _queue(client: SyncPrefectClient, name: str, settings: Settings) -> str:
    try:
        queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
        limit = queue.concurrency_limit
    except ObjectNotFound:
        queue, limit = client.create_work_queue(name, work_pool_name=POOL), 1 if name == "training" else None
    if name == "training" and settings.trainings is not None:
        limit = settings.trainings
    client.update_work_queue(queue.id, description=QUEUES[name], concurrency_limit=limit)
    return f"queue {name}, {limit or 'any number'} at a time"


def _put_standard(client: SyncPrefectClient) -> str:
    """Puts the deployments of prefect.yaml on the server."""
    standard, present, skipped = read_standard(), list_deployments(client), []
    for one in standard:
        module = one["entrypoint"].rpartition(".")[2]
        name = f"{module.replace('_', '-')}/{one['name']}"
        if name in present and TAG not in present[name].tags:
            skipped.append(name)  # another project's
            continue
        put_deployment(client, one["name"], module, one["parameters"], one["description"], one["tags"], present)
    others = f"; left alone, of another project: {', '.join(skipped)}" if skipped else ""
    return f"{len(standard) - len(skipped)} deployments of {ROOT / 'prefect.yaml'}, without schedules{others}"


def _automation(client: SyncPrefectClient, wanted: AutomationCore, enabled: bool | None = None) -> str:
    """Creates the automation, or replaces the one of that name.

    Args:
        enabled: Whether it is on. None keeps what was switched in the UI.
    """
    found = client.read_automations_by_name(wanted.name)
    if enabled is None and found:
        enabled = found[0].enabled
    if enabled is not None:
        wanted = wanted.model_copy(update={"enabled": enabled})
    if found:
        client.update_automation(found[0].id, wanted)
    else:
        client.create_automation(wanted)
    return f"automation '{wanted.name}' ({'on' if wanted.enabled else 'off'})"


def parse(words: Sequence[str], model: type[Options]) -> Options:
    """Parses key=value words into options.

    Raises:
        ConfigError: If a word is none of them, or its value cannot be. It names the word.
    """
    values = {key: _value(text) for key, _, text in (word.partition("=") for word in words)}
    for key in values:
        if key not in model.model_fields:
            raise ConfigError(f"argument '{key}'", f"one of {', '.join(model.model_fields)}", f"'{key}'", "Correct it.")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        expected = first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"argument '{first['loc'][0]}'", expected, f"{first['input']!r}", "Correct it.") from None


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # such as @daily
        return text
