"""Deploys configs: what runs on a Prefect server, and when. Safe to repeat.

    dlrm deploy                                     lists what is deployed, with schedules and next runs
    dlrm deploy configs/mine.yaml cron="0 5 * * *"  runs the config every morning, as recurring/mine
    dlrm deploy remove recurring/mine               removes that
    dlrm deploy setup                               prepares the server: work pool, queues, automations, all flows

With a config: `flow` (recurring), `cron`, `timezone` (UTC), `name` (the file's), `take_over` (false), parameters of the
flow and config keys. With setup: `trainings`, `chain`, `silent_seconds`, `pending_seconds`; without, they stay.

Not a Prefect flow: flows run on what it sets up. The server is that of `make ui`, or that of PREFECT_API_URL.
"""

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_AUTH_STRING
from pydantic import BaseModel

from flows.deployments.deployment import (
    OF_CONFIG,
    OWNER,
    POOL,
    describe_schedule,
    find_flow,
    has_worker,
    list_deployments,
    owner,
    parse_schedule,
    put_deployment,
    remove_deployment,
    require_ours,
    set_schedule,
)
from flows.deployments.profile import write_profile
from flows.deployments.setup import Settings, parse, prepare, set_up
from flows.runtime.access import authenticated, require_server
from flows.runtime.cli import check_types, describe_error
from flows.runtime.cli import parse as parse_parameters
from flows.runtime.console import TAG
from flows.runtime.environment import keep_private, set_environment
from pipeline.config import load
from pipeline.config.files import ROOT, home_path
from pipeline.errors import ConfigError


class Options(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Options of `dlrm deploy CONFIG`."""

    flow: str = "recurring"
    """The flow that runs the config."""
    cron: str | None = None
    """When it runs: minute, hour, day of month, month, day of week. None keeps the schedule that is there."""
    timezone: str = "UTC"
    """Of `cron`, such as Europe/Berlin."""
    name: str | None = None
    """Name of the deployment. None takes that of the file."""
    take_over: bool = False
    """Replaces a deployment of that name that somebody else has made, or that runs another config."""


def deploy_config(client: SyncPrefectClient, path: str, words: Sequence[str]) -> dict[str, Any]:
    """Makes the deployment of a config, and sets its schedule if one is given.

    Returns:
        Its name, schedules and whether a worker is there to run it.

    Raises:
        ConfigError: If an argument or the config is wrong, or the name is taken.
    """
    own = {word for word in words if word.partition("=")[0] in Options.model_fields}
    options = parse(sorted(own), Options)
    module, name = options.flow.replace("-", "_"), options.name or Path(path).stem
    flow, _ = find_flow(module)
    rest = [word for word in words if word not in own]
    known = [one for one in inspect.signature(flow.fn).parameters if one not in ("config", "overrides")]
    overrides, parameters = parse_parameters(rest, known)
    check_types(parameters, flow.fn)
    config = load(path, overrides)
    if module == "recurring":
        from pipeline.jobs.recurring.day import require_hash_split  # the flow has loaded it

        require_hash_split(config.split)
    schedule = None if options.cron is None else parse_schedule(options.cron, options.timezone)
    place, present = _portable(path), list_deployments(client)
    if (taken := present.get(f"{flow.name}/{name}")) is not None and not options.take_over:
        require_ours(taken, f"{flow.name}/{name}", place)
    if POOL not in [one.name for one in client.read_work_pools()]:
        prepare(client, Settings())
    given = {"config": place, **({"overrides": overrides} if overrides else {}), **parameters}
    tags = [TAG, OF_CONFIG, f"{OWNER}{owner()}"]
    full = put_deployment(client, name, module, given, f"Runs {place}. Made by `dlrm deploy`.", tags, present)
    if schedule is not None:
        set_schedule(client, client.read_deployment_by_name(full), schedule)
    found = client.read_deployment_by_name(full)
    return {
        "deployment": full,
        "config": place,
        "schedules": [describe_schedule(one, found.paused) for one in found.schedules],
        "worker": has_worker(client),
    }


def _portable(path: str) -> str:
    """Returns a config's path as any checkout of this project finds it, or else as this machine does."""
    full = next((one for one in (Path.cwd() / path, ROOT / path) if one.exists()), Path(path)).resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else str(full)


def run(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Does what the words say, on the server at PREFECT_API_URL or on that of this home.

    Returns:
        Lines for people, and the result.

    Raises:
        ConfigError: If a word is wrong, there is no server, or it takes no authentication of ours.
    """
    action, rest = (words[0], words[1:]) if words else ("list", [])
    settings = parse(rest, Settings) if action == "setup" else Settings()
    if "=" in action:
        remedy = 'Such as dlrm deploy configs/mine.yaml cron="0 5 * * *", or dlrm deploy setup trainings=2.'
        raise ConfigError("command line", "a config, or one of setup, remove and list, first", f"'{action}'", remedy)
    home = home_path(".dlrm")
    address = require_server(home)
    with authenticated(address, home), get_client(sync_client=True) as client:
        note = write_profile(home, address, PREFECT_API_AUTH_STRING.value())
        if action == "setup":
            done = set_up(client, settings)
            return [*done, note], {"done": done}
        if action == "remove":
            if len(rest) != 1:
                raise ConfigError("command line", "one name behind remove", " ".join(rest) or "none", "Give one.")
            name = remove_deployment(client, rest[0])
            return [f"removed {name} and its schedules; its past runs stay"], {"removed": name}
        if action == "list":
            return _list(client)
        found = deploy_config(client, action, rest)
    name = found["deployment"]
    lines = [f"deployment {name} runs {found['config']}"]
    lines += [f"schedule     {one}" for one in found["schedules"]] or ['no schedule: add one with cron="0 5 * * *"']
    lines += [f"run it now   prefect deployment run {name}", f"stop it      dlrm deploy remove {name}", note]
    lines += [] if found["worker"] else ["warning: no worker takes its runs. Start one: make worker"]
    return lines, found


def _list(client: SyncPrefectClient) -> tuple[list[str], dict[str, Any]]:
    """Lists deployments of configs and those with a schedule, and counts the others."""
    present = {name: one for name, one in list_deployments(client).items() if TAG in one.tags}
    shown = {name: one for name, one in present.items() if OF_CONFIG in one.tags or one.schedules}
    width = max(map(len, shown), default=0)
    lines, rows = [], []
    for name, one in shown.items():
        schedules = [describe_schedule(schedule, one.paused) for schedule in one.schedules]
        rows.append({"deployment": name, "config": one.parameters.get("config"), "schedules": schedules})
        lines.append(f"{name:<{width}}  {one.parameters.get('config')}  {'; '.join(schedules) or 'no schedule'}")
    others = len(present) - len(shown)
    lines += [f"{others} others have no schedule: they run when somebody starts them"] if others else []
    lines = lines or ["nothing is deployed. Such as: dlrm deploy configs/mine.yaml"]
    return lines, {"deployments": rows}


def main(words: Sequence[str]) -> int:
    """Deploys, prints what it did and, as the last line, one JSON object."""
    try:
        lines, result = run(words)
    except Exception as error:
        text = describe_error(error, debug=False)
        print(f"error: {text}", file=sys.stderr)
        print(json.dumps({"status": "failed", "error": text}))
        return 1
    print("\n".join(lines))
    print(json.dumps({"status": "ok"} | result))
    return 0


if __name__ == "__main__":
    set_environment()
    keep_private()
    sys.exit(main(sys.argv[1:]))
