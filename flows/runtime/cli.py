"""The shared `python -m flows.NAME CONFIG.yaml key=value` front."""

import errno
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import yaml
from prefect.settings import (
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    temporary_settings,
)
from pydantic import TypeAdapter, ValidationError

from pipeline.config import RunConfig, load
from pipeline.config.draft import Draft
from pipeline.config.files import home_path, parse_yaml
from pipeline.errors import ConfigError, ContractError
from pipeline.process import die_with_parent

USAGE = "Usage: python -m flows.{name} CONFIG.yaml [key=value ...] [--debug]"
Result = dict[str, Any]
log = logging.getLogger("dlrm")


def main(flow: Any, arguments: Sequence[str] | None = None, read: Callable[..., RunConfig | Draft] = load) -> NoReturn:
    """Runs a flow from the command line and ends the process.

    The last line of standard output is one JSON object with the result. Exit code 0 for ok and skipped, else 1.

    Args:
        read: Makes a config of a file and overrides.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        if not debug:
            hide_tracebacks()
        result = run(flow, [word for word in words if word != "--debug"], read)
    except KeyboardInterrupt:
        result = {"status": "failed", "error": "interrupted; run the same command again to go on."}
    except Exception as error:  # whatever went wrong, the caller gets one sentence and a result line
        if debug:
            traceback.print_exc()
        result = {"status": "failed", "error": sentence(error)}
    sys.stderr.flush()
    if result["status"] == "failed":
        print(f"error: {result['error']}", file=sys.stderr)
    print(json.dumps(result, default=str), flush=True)
    sys.exit(0 if result["status"] in ("ok", "skipped") else 1)


def run(flow: Any, words: Sequence[str], read: Callable[..., RunConfig | Draft] = load) -> Result:
    """Parses the words, checks the config, runs the flow with Prefect's data below `home`."""
    if not words or "=" in words[0]:
        raise ConfigError(
            "command line", "a config file first", " ".join(words) or "nothing", USAGE.format(name=_module(flow))
        )
    overrides, parameters = parse(words[1:], flow.fn)
    config = read(words[0], overrides)
    if "overrides" in inspect.signature(flow.fn).parameters:  # the config has them, too; a replay asks for them
        parameters = {"overrides": overrides, **parameters}
    with prefect_at_home(config):
        start_server()
        result: Result = flow(config=config, **parameters)
    return result


def parse(words: Sequence[str], function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """key=value words as config overrides (dotted keys, and keys of the config's top level) and flow parameters.

    Example:
        >>> parse(["training.epochs=2", "seed=3"], lambda config, force=False: None)
        ({'training.epochs': 2, 'seed': 3}, {})
    """
    signature = inspect.signature(function, eval_str=True).parameters
    known = [name for name in signature if name not in ("config", "overrides")]
    overrides: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"argument '{word}'", "key=value", "no '='", "Write it like training.epochs=2.")
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            value = text
        if key == "again" and "force" in known:
            log.warning("again=%s is called force=%s now; the former name goes with the next version.", text, text)
            key = "force"
        if "." in key or (key not in known and key in RunConfig.model_fields):
            overrides[key] = value
        elif key in known:
            parameters[key] = value
            _check(key, value, signature[key].annotation)
        else:
            raise ConfigError(
                f"argument '{key}'",
                f"a parameter of this flow ({', '.join(known) or 'none'}) or a config key",
                "neither",
                "Write config keys with their section, like training.epochs=2.",
            )
    return overrides, parameters


def _check(name: str, value: Any, kind: Any) -> None:
    """Refuses a value before Prefect does, which would print all parameters, passwords in the config among them."""
    try:
        TypeAdapter(Any if kind is inspect.Parameter.empty else kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ConfigError(f"argument '{name}'", reason, f"{value!r:.80}", "Correct the value.") from None


def prefect_at_home(config: RunConfig | Draft) -> Any:
    """Settings that keep Prefect's database below `home`, unless a server is named."""
    if PREFECT_API_URL.value() or os.environ.get("PREFECT_API_URL"):
        return temporary_settings({})
    folder = home_path(config.home) / "prefect"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"home '{home_path(config.home)}'", "a folder that can be written to", f"'{error.strerror}'",
            "Set DLRM_HOME to another one.",
        ) from None  # fmt: skip
    return temporary_settings(
        {
            PREFECT_HOME: folder,
            PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{folder.resolve()}/prefect.db",
        }
    )


def start_server() -> None:
    """Starts Prefect's temporary server, if there is no other, out of reach of Ctrl-C.

    A terminal interrupts every process of the command. The server has to live on until the flow has told it how it
    ended: without an answer Prefect would wait for minutes.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_EPHEMERAL_ENABLED.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits what is blocked
    start: Any = subprocess.Popen
    bound = partial(start, preexec_fn=partial(die_with_parent, os.getpid()))  # Prefect would leave it behind
    try:
        subprocess.Popen = bound  # type: ignore[misc,assignment]
        SubprocessASGIServer().start()
    finally:
        subprocess.Popen = start  # type: ignore[misc]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sentence(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, ContractError):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"parameter '{'.'.join(map(str, first['loc']))}': {first['msg']}, got {first['input']!r:.80}."
    line, *others = [text.strip(" -") for text in str(error).splitlines() if text.strip()] or ["no message"]
    line += f" {'; '.join(others)}" if line.endswith(":") else ""
    return f"{type(error).__name__}: {line} (--debug shows more)"


def hide_tracebacks() -> None:
    """Takes tracebacks out of Prefect's log: the error's sentence says what to do."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info, record.exc_text = None, None
    return True


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _module(flow: Any) -> str:
    return str(flow.name).replace("-", "_")
