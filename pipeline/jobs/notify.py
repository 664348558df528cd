"""Notifications of what needs a person: a failure, a held day, a rejected model, a stale or badly calibrated champion.

Settings are in `home/notify.yaml`, not in configs: they hold for all configs of a home, also for one that a deployed
run cannot read, and are part of no training's identity. The process of the run sends, with or without a Prefect server.
"""

import datetime
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, ValidationError

from pipeline.config.files import read_yaml
from pipeline.data.present import newest_day
from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from storage.artifacts import write_json

FILE, SENT = "notify.yaml", "notified.json"
"""Files of a home: the settings, and when the message about each cause was sent."""
VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
COMMAND_SECONDS = 20.0
"""Longest run of a command that takes a message."""
KEPT = datetime.timedelta(days=90)
"""How long it is remembered that a message was sent."""
Kind = Literal["failure", "held", "rejection", "stale", "calibration"]
KINDS: tuple[Kind, ...] = ("failure", "held", "rejection", "stale", "calibration")
REPEAT_AFTER: Mapping[Kind, datetime.timedelta] = {kind: datetime.timedelta(hours=20) for kind in ("failure", "stale")}
"""How long to wait before repeating a message about an ongoing cause. Other messages are never repeated."""


class NotifyConfig(BaseModel, frozen=True, extra="forbid"):
    """Where to send messages, and which."""

    addresses: tuple[str, ...] = ()
    """Addresses of Apprise, such as `mailto://...`. `$NAME` is a variable of the environment, as for secrets."""
    command: tuple[str, ...] | None = None
    """Program and arguments. It gets the message on standard input and the subject as DLRM_SUBJECT."""
    on: tuple[Kind, ...] = KINDS
    stale_days: NonNegativeInt = 7
    """Days in the table after the champion's last one from which it counts as stale."""


class Message(BaseModel, frozen=True):
    """A notification."""

    kind: Kind
    cause: str
    """Same cause: no second message."""
    subject: str
    text: str


def read_settings(home: Path) -> NotifyConfig | None:
    """Reads the settings of a home. None: it has none.

    Raises:
        ConfigError: If the file is invalid.
    """
    path = home / FILE
    if not path.exists():
        return None
    try:
        return NotifyConfig.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"'{path}', key '{key}'", first["msg"], f"{first['input']!r:.80}", "Correct it.") from None


def describe_failure(command: str, config: str, sentence: str, wrong_config: bool = False) -> Message:
    """Returns the message that a command failed.

    Args:
        sentence: What is wrong and what to do, in one line.
        wrong_config: Whether the same command would fail again.
    """
    again = f"python -m flows.{command.replace('-', '_')} {config}"
    how = "Once that is corrected" if wrong_config else "The same command goes on where this one ended"
    text = f"{sentence}\n\n{how}: {again}"
    return Message(
        kind="failure", cause=f"{command} {config} {sentence}", subject=f"{command} {config} failed", text=text
    )


def list_messages(
    command: str, config: str, result: Mapping[str, Any], bounds: tuple[float, float]
) -> Iterator[Message]:
    """Yields what people should know of a finished command.

    Args:
        config: Name of the config.
        result: The command's result line.
        bounds: Lowest and highest calibration that the gate allows.
    """
    yield from _list_held(config, result)
    for one in result.get("verdicts") or [result]:
        yield from _list_verdicts(config, one, bounds)


def _list_held(config: str, result: Mapping[str, Any]) -> Iterator[Message]:
    """Yields a message for each day that is held back, of the samples and of event tables."""
    ingested = result.get("ingest") or result
    tables = {config: result.get("held") or ingested.get("held") or []}
    tables |= {table: one.get("held") or [] for table, one in (ingested.get("events") or {}).items()}
    for table, days in tables.items():
        for day in sorted(days):
            yield Message(
                kind="held", cause=f"{table} {day}", subject=f"{config}: day {day} of table {table} is held back",
                text="It broke a rule of the ingest checks. The table keeps its version of it.\n\n"
                f"The day is in table {table}_held. Mend the input and ingest again, or relax the rule. A day that "
                f"would lose something is written as it is by: python -m flows.ingest CONFIG day={day} force=true",
            )  # fmt: skip


def _list_verdicts(config: str, result: Mapping[str, Any], bounds: tuple[float, float]) -> Iterator[Message]:
    """Yields what people should know of one day, or of a training."""
    if result["status"] == "skipped":
        return
    judged, model = result.get("judged") or {}, result.get("model") or {}
    if isinstance(model, str):  # of a scoring
        model = {"name": model}
    name = model.get("name", config)  # several models may be trained on one table
    verdicts = [(judged.get("version"), judged.get("gate")), (model.get("version"), result.get("gate"))]
    for version, gate in verdicts:
        if gate and gate["decision"] == "reject":
            yield Message(
                kind="rejection", cause=f"{name} {version}", subject=f"{name}: version {version} was rejected",
                text=f"{gate['reason']}\n\nThe champion stays. See python -m flows.report CONFIG run={version}. "
                f"To overrule the gate: python -m flows.promote CONFIG version={version}",
            )  # fmt: skip
    quality = result.get("champion_eval")
    if quality is None:
        return
    calibration = quality.get("calibration")
    if calibration is None or not bounds[0] <= calibration <= bounds[1]:
        reason = (quality.get("undefined") or {}).get("calibration", "not a number")
        found = f"undefined: {reason}" if calibration is None else f"{calibration:.3f}"
        yield Message(
            kind="calibration", cause=f"{name} {result.get('day')}",
            subject=f"{name}: the champion's calibration is {found}",
            text=f"On {result.get('day')} the calibration of version {result.get('champion')}, predictions over "
            f"positive labels, is {found}. The gate allows {bounds[0]:g} to {bounds[1]:g}.\n\nLook whether the labels "
            "of that day are complete. If they are, train: python -m flows.recurring CONFIG. An earlier champion: "
            "python -m flows.rollback CONFIG",
        )  # fmt: skip


def find_stale(workspace: Workspace, limit: int) -> Message | None:
    """Returns the message that the champion of a config is stale. None: it is not, or there is none."""
    from pipeline.registration.aliases import find_holder  # loads MLflow

    tracker, warehouse, config = workspace.tracking, workspace.warehouse, workspace.config
    champion = find_holder(tracker, config.model_name)
    version = None if champion is None else tracker.get_version(config.model_name, str(champion))
    if champion is None or version is None or "trained_to" not in version.tags:
        return None
    newest = newest_day(warehouse.day_rows(warehouse.current(config.name)))
    if newest is None:
        return None
    return describe_stale(
        config.model_name, champion, datetime.date.fromisoformat(version.tags["trained_to"]), newest, limit
    )


def describe_stale(
    model: str, version: int, trained_to: datetime.date, newest: datetime.date, limit: int
) -> Message | None:
    """Returns the message that a champion lacks too many days of the table. None: it does not.

    Args:
        model: Its name in the registry.
        newest: Newest day of the table that has begun.
        limit: Days from which a champion counts as stale.

    Example:
        >>> describe_stale("demo", 3, datetime.date(2025, 1, 1), datetime.date(2025, 1, 9), 7).subject
        'demo: the champion is 8 days behind its table'
    """
    behind = (newest - trained_to).days
    if behind < max(limit, 1):
        return None
    return Message(
        kind="stale", cause=f"{model} {version}", subject=f"{model}: the champion is {behind} days behind its table",
        text=f"Version {version} is trained to {trained_to}, and the table has days up to {newest}.\n\n"
        "Look why no later model was promoted: python -m flows.recurring CONFIG trains on the missing days",
    )  # fmt: skip


class Notifier:
    """Sends messages, each cause once. It never raises: the run that sends them has its own result.

    Args:
        home: Of the command.
        warn: Called with a sentence if a message cannot be sent.
    """

    def __init__(self, home: Path, warn: Callable[[str], object]) -> None:
        self.home, self.warn = home, warn

    def send(self, messages: Sequence[Message]) -> int:
        """Sends the messages that are wanted and new. Returns their number."""
        try:
            settings = read_settings(self.home)
            return 0 if settings is None else sum(self._send(settings, one) for one in messages)
        except Exception as error:
            self.warn(f"no message was sent: {type(error).__name__}: {error}")
            return 0

    def _send(self, settings: NotifyConfig, message: Message) -> bool:
        now = datetime.datetime.now(datetime.UTC)
        times = self._read_times(now)
        key = hashlib.sha256(f"{message.kind} {message.cause}".encode()).hexdigest()[:16]
        wait = REPEAT_AFTER.get(message.kind)
        if message.kind not in settings.on or (key in times and (wait is None or now - times[key] < wait)):
            return False
        sent = [self._attempt(name, send, message) for name, send in list_receivers(settings)]
        if any(sent):
            write_json(self.home / SENT, {one: time.isoformat() for one, time in (times | {key: now}).items()})
        return any(sent)

    def _read_times(self, now: datetime.datetime) -> dict[str, datetime.datetime]:
        found: dict[str, datetime.datetime] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged: it is sent again
            noted = json.loads((self.home / SENT).read_text(encoding="utf-8"))
            found = {key: datetime.datetime.fromisoformat(time) for key, time in noted.items()}
        return {key: time for key, time in found.items() if now - time < KEPT}

    def _attempt(self, name: str, send: Callable[[Message], object], message: Message) -> bool:
        try:
            send(message)
        except Exception as error:  # the message of an error may hold the address, which is a secret
            reason = f"{error}" if isinstance(error, ConfigError) else type(error).__name__
            self.warn(f"{name} did not take the message '{message.subject}': {reason}")
            return False
        return True


def list_receivers(settings: NotifyConfig) -> list[tuple[str, Callable[[Message], object]]]:
    """Returns a name without secrets and a function for each place to send to."""
    found: list[tuple[str, Callable[[Message], object]]] = [
        (one.partition(":")[0], partial(_send_to_address, one)) for one in settings.addresses
    ]
    if (command := settings.command) is not None:
        found.append((f"the command {command[0]}", partial(_run, command)))
    return found


def _send_to_address(address: str, message: Message) -> None:
    if missing := [name for name in VARIABLE.findall(address) if name not in os.environ]:
        raise ConfigError(
            f"a variable of '{FILE}'", f"{missing[0]} in the environment of this process", "none",
            "Set it where commands and workers start.",
        )  # fmt: skip
    from apprise import Apprise, NotifyFormat  # takes half a second

    receiver = Apprise()
    if not receiver.add(os.path.expandvars(address)):
        raise ValueError("no address of Apprise")
    if not receiver.notify(message.text, message.subject, body_format=NotifyFormat.TEXT):
        raise ConnectionError("the message was not taken")


def _run(command: Sequence[str], message: Message) -> None:
    text, environment = f"{message.subject}\n\n{message.text}\n", os.environ | {"DLRM_SUBJECT": message.subject}
    subprocess.run(
        command, input=text, text=True, timeout=COMMAND_SECONDS, check=True, env=environment, capture_output=True
    )
