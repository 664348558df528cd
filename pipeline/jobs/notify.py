"""Tells people what needs one of them: a failure, a held day, a rejected model, a stale or badly calibrated champion.

Settings are in `home/notify.yaml`, not in configs: they hold for all configs of a home, also for one that a deployed
run cannot read, and are part of no training's identity. The process of the run tells it, so that it works with and
without a Prefect server. Addresses with secrets come from the environment.
"""

import datetime
import hashlib
import json
import os
import smtplib
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from pipeline.config.files import read_yaml
from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from storage.artifacts import write_json

FILE, TOLD = "notify.yaml", "notified.json"
"""Files of a home: the settings, and which causes were told when."""
SECONDS = 20.0
"""Longest wait for a receiver."""
KEPT = datetime.timedelta(days=90)
"""How long it is remembered that a cause was told."""
Kind = Literal["failure", "held", "rejection", "stale", "calibration"]
KINDS: tuple[Kind, ...] = ("failure", "held", "rejection", "stale", "calibration")
AGAIN: Mapping[Kind, datetime.timedelta] = {kind: datetime.timedelta(hours=20) for kind in ("failure", "stale")}
"""When a cause that lasts is told again. Others are told once."""


class Mail(BaseModel, frozen=True, extra="forbid"):
    """A mail server and the addresses."""

    to: tuple[str, ...]
    sender: str
    host: str = "127.0.0.1"
    port: PositiveInt = 25
    tls: bool = False
    user: str | None = None
    password_variable: str = "DLRM_MAIL_PASSWORD"


class NotifyConfig(BaseModel, frozen=True, extra="forbid"):
    """Where to tell, and of what."""

    webhook_variable: str | None = None
    """Environment variable with the address of a Slack-compatible webhook."""
    mail: Mail | None = None
    command: tuple[str, ...] | None = None
    """Program and arguments. It gets the message on standard input and the subject as DLRM_SUBJECT."""
    on: tuple[Kind, ...] = KINDS
    stale_days: NonNegativeInt = 7
    """Days in the table after the champion's last one from which it counts as stale."""


class Message(BaseModel, frozen=True):
    """A message to people."""

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


def describe_failure(command: str, config: str, sentence: str) -> Message:
    """Returns the message that a command failed.

    Args:
        sentence: What is wrong and what to do, in one line.
    """
    name = command.replace("-", "_")
    text = f"{sentence}\n\nThe same command goes on where this one ended: python -m flows.{name} {config}"
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
    ingested = result.get("ingest") or result
    if held := [str(day) for day in result.get("held") or ingested.get("held") or []]:
        yield Message(
            kind="held", cause=f"{config} {' '.join(held)}", subject=f"{config}: {len(held)} days are held back",
            text=f"{', '.join(held[:10])} broke a rule of the ingest checks. The table keeps its versions of them.\n\n"
            f"They are in table {config}_held. Mend the input and ingest again, or write a day as it is: "
            f"python -m flows.ingest CONFIG day={held[0]} force=true",
        )  # fmt: skip
    judged = result.get("judged") or {}
    verdicts = [
        (judged.get("version"), judged.get("gate")),
        ((result.get("model") or {}).get("version"), result.get("gate")),
    ]
    for version, gate in verdicts:
        if gate and gate["decision"] == "reject" and result["status"] != "skipped":
            yield Message(
                kind="rejection", cause=f"{config} {version}", subject=f"{config}: version {version} was rejected",
                text=f"{gate['reason']}\n\nThe champion stays. See python -m flows.report CONFIG run={version}. "
                f"To overrule the gate: python -m flows.promote CONFIG version={version}",
            )  # fmt: skip
    calibration = (result.get("champion_eval") or {}).get("calibration")
    if calibration is not None and not bounds[0] <= calibration <= bounds[1] and result["status"] != "skipped":
        yield Message(
            kind="calibration", cause=f"{config} {result.get('day')}",
            subject=f"{config}: the champion's calibration is {calibration:.3f}",
            text=f"On {result.get('day')} version {result.get('champion')} predicted {calibration:.3f} times the "
            f"positive labels. The gate allows {bounds[0]:g} to {bounds[1]:g}.\n\nLook whether the labels of that day "
            "are complete. If they are, train: python -m flows.recurring CONFIG. An earlier champion: python -m "
            "flows.rollback CONFIG",
        )  # fmt: skip


def find_stale(workspace: Workspace, limit: int) -> Message | None:
    """Returns the message that the champion of a config is stale. None: it is not, or there is none."""
    from pipeline.registration.aliases import find_holder  # loads MLflow

    tracker, warehouse, config = workspace.tracking, workspace.warehouse, workspace.config
    champion = find_holder(tracker, config.model_name)
    version = None if champion is None else tracker.get_version(config.model_name, str(champion))
    if champion is None or version is None or "trained_to" not in version.tags:
        return None
    newest = max(warehouse.day_rows(warehouse.current(config.name)))
    return describe_stale(config.name, champion, datetime.date.fromisoformat(version.tags["trained_to"]), newest, limit)


def describe_stale(
    config: str, version: int, trained_to: datetime.date, newest: datetime.date, limit: int
) -> Message | None:
    """Returns the message that a champion lacks too many days of the table. None: it does not.

    Args:
        newest: Newest day of the table.
        limit: Days from which a champion counts as stale.

    Example:
        >>> describe_stale("demo", 3, datetime.date(2025, 1, 1), datetime.date(2025, 1, 9), 7).subject
        'demo: the champion is 8 days behind its table'
    """
    behind = (newest - trained_to).days
    if behind < max(limit, 1):
        return None
    return Message(
        kind="stale", cause=f"{config} {version}", subject=f"{config}: the champion is {behind} days behind its table",
        text=f"Version {version} is trained to {trained_to}, and the table has days up to {newest}.\n\n"
        "Look why no later model was promoted: python -m flows.recurring CONFIG trains on the missing days",
    )  # fmt: skip


class Notifier:
    """Sends messages, each cause once. It never raises: what it tells of has its own result.

    Args:
        home: Of the command.
        warn: Called with a sentence if a message cannot be sent.
    """

    def __init__(self, home: Path, warn: Callable[[str], object]) -> None:
        self.home, self.warn = home, warn

    def tell(self, messages: Sequence[Message]) -> int:
        """Sends the messages that are wanted and new. Returns their number."""
        try:
            settings = read_settings(self.home)
            return 0 if settings is None else sum(self._tell(settings, one) for one in messages)
        except Exception as error:
            self.warn(f"nobody was told: {type(error).__name__}: {error}")
            return 0

    def _tell(self, settings: NotifyConfig, message: Message) -> bool:
        now = datetime.datetime.now(datetime.UTC)
        told = self._read_told(now)
        key = hashlib.sha256(f"{message.kind} {message.cause}".encode()).hexdigest()[:16]
        before = told.get(key)
        again = AGAIN.get(message.kind)
        if message.kind not in settings.on or (before is not None and (again is None or now - before < again)):
            return False
        sent = [self._attempt(name, send, message) for name, send in list_receivers(settings)]
        if any(sent):
            times = {one: time.isoformat() for one, time in (told | {key: now}).items()}
            write_json(self.home / TOLD, times)
        return any(sent)

    def _read_told(self, now: datetime.datetime) -> dict[str, datetime.datetime]:
        found: dict[str, datetime.datetime] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):  # none yet, or damaged: tell it again
            noted = json.loads((self.home / TOLD).read_text(encoding="utf-8"))
            found = {key: datetime.datetime.fromisoformat(time) for key, time in noted.items()}
        return {key: time for key, time in found.items() if now - time < KEPT}

    def _attempt(self, name: str, send: Callable[[Message], object], message: Message) -> bool:
        try:
            send(message)
        except Exception as error:  # the message of an error may hold the address, which is a secret
            self.warn(f"{name} did not take the message '{message.subject}': {type(error).__name__}")
            return False
        return True


def list_receivers(settings: NotifyConfig) -> list[tuple[str, Callable[[Message], object]]]:
    """Returns a name and a function for each place to tell."""
    found: list[tuple[str, Callable[[Message], object]]] = []
    if settings.webhook_variable is not None:
        variable = settings.webhook_variable
        found.append((f"the webhook in {variable}", lambda message: _post(os.environ[variable], message)))
    if (mail := settings.mail) is not None:
        found.append((f"the mail server {mail.host}", lambda message: _mail(mail, message)))
    if (command := settings.command) is not None:
        found.append((f"the command {command[0]}", lambda message: _run(command, message)))
    return found


def _post(address: str, message: Message) -> None:
    body = json.dumps({"text": f"*{message.subject}*\n{message.text}"}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS):
        pass


def _mail(mail: Mail, message: Message) -> None:
    letter = EmailMessage()
    letter["Subject"], letter["From"], letter["To"] = message.subject, mail.sender, ", ".join(mail.to)
    letter.set_content(f"{message.text}\n\n{socket.gethostname()}")
    with smtplib.SMTP(mail.host, mail.port, timeout=SECONDS) as server:
        if mail.tls:
            server.starttls()
        if mail.user is not None:
            server.login(mail.user, os.environ[mail.password_variable])
        server.send_message(letter)


def _run(command: Sequence[str], message: Message) -> None:
    text, environment = f"{message.subject}\n\n{message.text}\n", os.environ | {"DLRM_SUBJECT": message.subject}
    subprocess.run(command, input=text, text=True, timeout=SECONDS, check=True, env=environment, capture_output=True)
