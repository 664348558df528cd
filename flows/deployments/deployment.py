"""Deployments on a Prefect server: what runs, with which config, and when.

A deployment names no folder with code. A worker imports the flow from its own installation, in which it also looks for
a config whose path is relative.
"""

import asyncio
import getpass
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import Flow
from prefect.server.schemas.schedules import SCHEDULE_TYPES
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter, ValidationError

from flows.runtime.console import TAG
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError

One = TypeVar("One")
POOL = "dlrm"
OF_CONFIG = "config"
"""Tag of what `dlrm deploy CONFIG` has made."""
OWNER = "owner:"
"""Begins the tag that names who has made it."""
SLUG = "dlrm-deploy"
"""Of the schedule that `dlrm deploy` has set. Schedules of people have other slugs, or none."""


@cache
def read_standard() -> list[dict[str, Any]]:
    """Returns the deployments of prefect.yaml, with all that a new one needs to know of its flow.

    Raises:
        ConfigError: If there is no such file, as in an installed package.
    """
    path = ROOT / "prefect.yaml"
    if not path.exists():
        raise ConfigError(
            f"prefect.yaml in '{ROOT}'", "the project's file of deployments", "none",
            "Deploy from a checkout of the project; an installed package has no deployments.",
        )  # fmt: skip
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["deployments"]
    return found


def find_flow(name: str) -> tuple[Flow[..., Any], dict[str, Any]]:
    """Imports a flow. Returns it, and where its runs go: work pool, queue and job variables.

    Args:
        name: Of its module in `flows`.
    Raises:
        ConfigError: If prefect.yaml has no such flow.
    """
    places = {one["entrypoint"].rpartition(".")[2]: one["work_pool"] for one in read_standard()}
    if name not in places:
        raise ConfigError("argument 'flow'", f"one of {', '.join(sorted(places))}", f"'{name}'", "Correct it.")
    found: Flow[..., Any] = getattr(import_module(f"flows.{name}"), name)
    return found, places[name]


def put_deployment(
    client: SyncPrefectClient,
    name: str,
    module: str,
    parameters: Mapping[str, Any],
    description: str,
    tags: Sequence[str],
    present: Mapping[str, DeploymentResponse],
) -> str:
    """Creates or updates a deployment. An existing one keeps its schedules, its switch and what else people have set.

    Args:
        name: Of the deployment, without that of the flow.
        module: Of the flow, in `flows`.
        parameters: Of its runs.
        present: What is deployed; see `list_deployments`.
    Returns:
        FLOW/NAME.
    """
    flow, place = find_flow(module)
    found = present.get(f"{flow.name}/{name}")
    kept = dict(found.job_variables or {}) if found is not None else {}
    own = place["job_variables"]
    wanted: dict[str, Any] = {
        "entrypoint": f"flows.{module}.{module}",
        "path": None,
        "pull_steps": [],
        "description": description,
        "tags": list(tags),
        "work_pool_name": place["name"],
        "work_queue_name": place["work_queue_name"],
        "job_variables": kept | own | {"env": {**(kept.get("env") or {}), **own.get("env", {})}},
        "parameters": dict(parameters),
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "enforce_parameter_schema": True,
    }
    if found is None:
        client.create_deployment(client.create_flow_from_name(flow.name), name, **wanted)
    elif any(getattr(found, key) != value for key, value in wanted.items()):
        client.update_deployment(found.id, DeploymentUpdate(**wanted))
    return f"{flow.name}/{name}"


def owner() -> str:
    """Returns who deploys: the user's name, or number where there is none, and this machine's name."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):
        user = f"{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def require_ours(found: DeploymentResponse, name: str, config: str) -> None:
    """Refuses to change what somebody else, or another config, has deployed under a name.

    Args:
        name: FLOW/NAME.
        config: Of the new one.

    Raises:
        ConfigError: It names the present owner and config.
    """
    present = found.parameters.get("config")
    whose = next((tag.removeprefix(OWNER) for tag in found.tags if tag.startswith(OWNER)), "nobody known")
    if whose != owner() or present != config:
        problem = f"deployment '{name}' exists: it is of {whose} and runs {present}"
        raise ConfigError.of(problem, "Choose another name with name=NAME, or replace it with take_over=true.")


def parse_schedule(cron: str, timezone: str) -> CronSchedule:
    """Returns a schedule.

    Raises:
        ConfigError: If cron or time zone cannot be.

    Example:
        >>> parse_schedule("0 5 * * *", "Europe/Berlin").timezone
        'Europe/Berlin'
    """
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise ConfigError("argument 'timezone'", "one such as Europe/Berlin", f"'{timezone}'", "Correct it.") from None
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValidationError:
        expected = "minute, hour, day of month, month and day of week, such as '0 5 * * *'"
        raise ConfigError("argument 'cron'", expected, f"'{cron}'", "Correct it.") from None


def set_schedule(client: SyncPrefectClient, found: DeploymentResponse, schedule: CronSchedule) -> None:
    """Sets the schedule of a deployment. One that is switched off stays off, and those of people stay as they are."""
    own = next((one for one in found.schedules if one.slug == SLUG), None)
    if own is None:
        client.create_deployment_schedules(found.id, [DeploymentScheduleCreate(schedule=schedule, slug=SLUG)])
    else:
        client.update_deployment_schedule(found.id, own.id, schedule=schedule)


def describe_schedule(schedule: DeploymentSchedule, paused: bool = False) -> str:
    """Returns what a schedule says, and when it starts a run next.

    Args:
        paused: Whether the deployment is.
    """
    rule: Any = schedule.schedule
    text = getattr(rule, "cron", None) or getattr(rule, "rrule", None) or f"every {getattr(rule, 'interval', '?')}"
    zone = getattr(rule, "timezone", None) or "UTC"
    if paused or not schedule.active:
        return f"{text} {zone}, switched off"
    following = next_run(schedule)
    when = "never again" if following is None else f"next {following.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M}"
    return f"{text} {zone}, {when}"


def next_run(schedule: DeploymentSchedule) -> datetime | None:
    """Returns when a schedule starts a run next, by the rules of Prefect's server."""
    adapter: TypeAdapter[Any] = TypeAdapter(SCHEDULE_TYPES)
    rule = adapter.validate_python(schedule.schedule.model_dump())
    dates: list[datetime] = asyncio.run(rule.get_dates(1))
    return dates[0] if dates else None


def list_deployments(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    """Returns all deployments of the server by FLOW/NAME, sorted. Ours have the tag `dlrm`."""
    names = {one.id: one.name for one in _pages(client.read_flows)}
    named = {f"{names[one.flow_id]}/{one.name}": one for one in _pages(client.read_deployments)}
    return dict(sorted(named.items()))


def _pages(read: Callable[..., Sequence[One]]) -> list[One]:
    found: list[One] = []
    while page := read(limit=200, offset=len(found)):
        found += page
    return found


def remove_deployment(client: SyncPrefectClient, name: str) -> str:
    """Removes a deployment with its schedules. Its past runs stay.

    Args:
        name: FLOW/NAME, or NAME if no other flow has one of that name.
    Returns:
        FLOW/NAME.
    Raises:
        ConfigError: If there is none, or several.
    """
    present = {one: found for one, found in list_deployments(client).items() if TAG in found.tags}
    fitting = [one for one in present if name in (one, one.partition("/")[2])]
    if len(fitting) != 1:
        remedy = "Give one of them." if fitting else "`dlrm deploy` lists those that there are."
        raise ConfigError("deployment", "the name of one deployment", f"'{name}', {len(fitting)} of them", remedy)
    client.delete_deployment(present[fitting[0]].id)
    return fitting[0]


def has_worker(client: SyncPrefectClient) -> bool:
    """Whether a worker takes runs of the pool."""
    return any(one.status == "ONLINE" for one in client.read_workers_for_work_pool(POOL))
