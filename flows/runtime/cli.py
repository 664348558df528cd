"""The shared `python -m flows.NAME CONFIG.yaml key=value` front.

It reads the words and the config before anything heavy is imported, then starts servers, which load at the same time as
the flow's own imports. `flows.runtime.front` calls it.
"""

import atexit
import errno
import importlib
import inspect
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from flows.runtime import INTERRUPTED
from flows.runtime.access import authenticated, find_own_server, server_address
from flows.runtime.dlrm import parameters_of
from flows.runtime.environment import make_private
from flows.runtime.placeholders import complete, note_path
from flows.runtime.plain import is_plain
from flows.runtime.redaction import hide, remember
from flows.runtime.server import Process, TemporaryServer
from pipeline.config import RunConfig, load
from pipeline.config.draft import Draft
from pipeline.config.files import home_path, parse_yaml
from pipeline.config.keys import closest_key
from pipeline.config.validation_messages import ELSEWHERE
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.transient import explain_request
from pipeline.jobs.warm_up import load_stores, start_fork_servers
from pipeline.processes.process import loading

USAGE = "Usage: python -m flows.{name} CONFIG.yaml [key=value ...] [--debug]"
FLAGS = ("--debug", "--json")
TRAINING = ("train", "end_to_end", "recurring", "backfill", "replay", "sweep", "release")
"""Commands that start ranks."""
FAILED = re.compile(
    r"failed: |Task run failed with|Encountered exception during execution|Finished in state (Failed|Cancelled)"
)
"""Beginnings of Prefect's lines about a failure."""
FULL = (errno.ENOSPC, errno.EDQUOT)
Result = dict[str, Any]
log = logging.getLogger("dlrm")


def main(
    flow: Any,
    words: Sequence[str],
    read: Callable[..., RunConfig | Draft] = load,
    without_config: Mapping[str, Any] | None = None,
    process: Process | None = None,
) -> int:
    """Runs a flow and prints its result, one JSON object, as the last line of standard output.

    At a terminal it prints a summary. `--json` prints the object there, too.

    Args:
        flow: The flow, or the name of its file, which is imported when the words and the config are in order.
        process: One that loads Prefect's server already. It is killed if no server is needed.
    Returns:
        The exit code: 0 for ok and skipped, `INTERRUPTED` after Ctrl-C and SIGTERM, else 1.
    """
    debug, code = "--debug" in words, 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run(flow, [word for word in words if word not in FLAGS], read, without_config, debug, process)
    except KeyboardInterrupt:
        ending = sys.modules.get("flows.runtime.ending")
        how = "cancelled at the Prefect server" if ending is not None and ending.cancelled.is_set() else "interrupted"
        result, code = {"status": "failed", "error": f"{how}; run the same command again to go on."}, INTERRUPTED
    except Exception as error:  # whatever went wrong, the caller gets one sentence and a result line
        result = {"status": "failed", "error": describe_error(error, debug)}
    sys.stderr.flush()
    if result["status"] == "failed":
        print(f"error: {result['error']}", file=sys.stderr)
    if not sys.stdout.isatty() or "--json" in words:
        print(json.dumps(result, default=str), flush=True)
    elif result["status"] != "failed":
        from pipeline.jobs.outcome import summarize  # loads what only commands that work need

        print("\n".join(summarize(result)), flush=True)
    return 0 if result["status"] in ("ok", "skipped") else code


def run(
    flow: Any,
    words: Sequence[str],
    read: Callable[..., RunConfig | Draft] = load,
    without_config: Mapping[str, Any] | None = None,
    debug: bool = False,
    process: Process | None = None,
) -> Result:
    """Parses the words, checks the config, runs the flow with Prefect's data below `home`."""
    name = flow if isinstance(flow, str) else str(flow.name).replace("-", "_")
    given, rest = (words[0], words[1:]) if words and "=" not in words[0] else (without_config, words)
    if given is None:
        raise ConfigError("command line", "a config file first", " ".join(words) or "nothing", USAGE.format(name=name))
    note_path(given)
    known = parameters_of(flow) if isinstance(flow, str) else list(inspect.signature(flow.fn).parameters)
    overrides, parameters = parse(rest, [key for key in known if key not in ("config", "overrides")])
    if "home" in overrides and os.environ.get("DLRM_HOME"):
        raise ConfigError(
            "argument 'home'", "no DLRM_HOME, which overrules it", f"DLRM_HOME={os.environ['DLRM_HOME']}",
            "Unset that, or leave home= out.",
        )  # fmt: skip
    config = read(given, overrides)
    remember(config)
    address = server_address()
    plain = isinstance(flow, str) and is_plain(name, parameters) and address is None
    if address is None and not plain:
        address = find_own_server(home_path(config.home))
    server = None if plain or address is not None else start_server(config, process)
    if server is None and process is not None:
        process.kill()
    if isinstance(flow, str):
        if name in TRAINING and isinstance(config, RunConfig):
            start_fork_servers(config)
        flow = import_flow(flow, plain)
    check_types(parameters, getattr(flow, "fn", flow))
    if "overrides" in known:  # the config has them, too; a replay asks for them
        parameters = {"overrides": overrides, **parameters}
    if not debug and not plain:
        hide_tracebacks()
    with ExitStack() as stack:
        if server is not None:
            if name in TRAINING and isinstance(config, RunConfig):
                load_stores(config.registration)
            stack.enter_context(prefect_settings(server))
        elif address is not None:
            stack.enter_context(authenticated(address, home_path(config.home), home_path(".dlrm")))
            from flows.runtime import ending

            ending.others_can_cancel = True
        elif plain:  # most of its time is imports, also those in functions
            stack.enter_context(loading())
        result: Result = flow(config=config, **parameters)
    return result


def import_flow(name: str, plain: bool) -> Any:
    """Imports a flow from its file.

    Args:
        plain: As a plain function, which logs to standard error.
    """
    if plain:
        from flows.runtime import flow

        flow.without_prefect = True
        style = "%(asctime)s | %(levelname)-7s | %(message)s"
        logging.basicConfig(level=logging.WARNING, format=style, datefmt="%H:%M:%S")
        log.setLevel(logging.INFO)
    else:
        with loading():
            importlib.import_module("prefect.main")  # first: it sets logging up, as fbgemm_gpu does where nobody has
    with loading():
        return getattr(importlib.import_module(f"flows.{name}"), name)


def start_server(config: RunConfig | Draft, process: Process | None = None) -> TemporaryServer:
    """Starts a Prefect server over the database below `home`. It ends when the command does."""
    server = TemporaryServer(_prefect_folder(config), process)
    atexit.register(server.stop)  # Prefect sends its last lines at exit, before this
    return server


@contextmanager
def prefect_settings(server: TemporaryServer) -> Iterator[None]:
    """Makes Prefect use the temporary server, which has no pages to view."""
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_DATABASE_CONNECTION_URL,
        PREFECT_API_URL,
        PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_HOME,
        temporary_settings,
    )

    server.wait()
    logging.getLogger("prefect.flow_runs").addFilter(lambda record: not str(record.msg).startswith("View at"))
    with temporary_settings(
        {
            PREFECT_HOME: server.folder,
            PREFECT_API_DATABASE_CONNECTION_URL: server.settings["PREFECT_API_DATABASE_CONNECTION_URL"],
            PREFECT_API_URL: server.address,
            PREFECT_API_AUTH_STRING: server.secret,
            PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False,  # it is ours, and of the same version
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,  # no automation listens, and a run would end up to a second later
        }
    ):
        yield


def _prefect_folder(config: RunConfig | Draft) -> Path:
    folder = home_path(config.home) / "prefect"
    try:
        make_private(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        problem = f"cannot write to home '{home_path(config.home)}': {error.strerror}"
        raise ConfigError.of(problem, "Set DLRM_HOME to another folder.") from None
    return folder


def parse(words: Sequence[str], known: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits key=value words into config overrides (dotted keys, and keys of its top level) and flow parameters.

    Args:
        known: Names of the flow's parameters.

    Example:
        >>> parse(["training.epochs=2", "seed=3", "force=true"], ["force"])
        ({'training.epochs': 2, 'seed': 3}, {'force': True})
    """
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
        if "." in key or (key not in known and (key in RunConfig.model_fields or key in ELSEWHERE)):
            overrides[key] = value
        elif key in known:
            parameters[key] = value
        else:
            close = closest_key(key, known)
            raise ConfigError(
                f"argument '{key}'",
                f"a parameter of this flow ({', '.join(known) or 'none'}) or a config key",
                "neither",
                f"Did you mean {close}?" if close else "Write config keys with their section, like training.epochs=2.",
            )
    return overrides, parameters


def check_types(parameters: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuses a value before Prefect does, which would print all parameters, passwords in the config among them."""
    signature = inspect.signature(function, eval_str=True).parameters
    for name, value in parameters.items():
        kind = signature[name].annotation
        try:
            TypeAdapter(Any if kind is inspect.Parameter.empty else kind).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ConfigError(f"argument '{name}'", reason, f"{value!r:.80}", "Correct the value.") from None


def describe_error(error: BaseException, debug: bool) -> str:
    """Returns the error at hand as one line without credentials. Prints its traceback, too, if `debug`."""
    if debug:
        print(hide(traceback.format_exc()), file=sys.stderr)
    return complete(hide(sentence(error)))


def sentence(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, Exception):
        error = explain_request(error)
    if isinstance(error, ContractError):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"parameter '{'.'.join(map(str, first['loc']))}': {first['msg']}, got {first['input']!r:.80}."
    if isinstance(error, OSError) and (error.errno in FULL or "No space left" in str(error)):
        return _describe_full_disk(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        remedy = "Let its owner give it to you, or set DLRM_HOME to a folder of your own."
        return f"no permission to use '{error.filename}'. {remedy}"
    line, *others = [text.strip(" -") for text in str(error).splitlines() if text.strip()] or ["no message"]
    line += f" {'; '.join(others)}" if line.endswith(":") else ""
    return f"{type(error).__name__}: {line} (--debug shows more)"


def _describe_full_disk(error: OSError) -> str:
    """Says which disk is full: of those of the file, the home and temporary files, the one with the least space."""
    given = [Path(str(error.filename)).parent] if error.filename else []
    folders = [path for path in (*given, home_path(".dlrm"), Path(tempfile.gettempdir())) if path.exists()]
    folder = min(folders, key=lambda path: shutil.disk_usage(path).free)
    free, total = (getattr(shutil.disk_usage(folder), name) / 2**20 for name in ("free", "total"))
    remedy = "Free some, for which flows.clean lists what can go, or set DLRM_HOME or TMPDIR to another disk."
    return f"the disk of '{folder}' is full: {free:,.0f} MiB of {total:,.0f} are free. {remedy}"


def hide_tracebacks() -> None:
    """Takes failures and tracebacks out of what Prefect prints: the last line says what to do. Its pages have them."""
    from prefect.logging.handlers import PrefectConsoleHandler

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_is_no_failure)


def _is_no_failure(record: logging.LogRecord) -> bool:
    """Whether a record is no line of Prefect about the failure of a task or a flow, of which it writes four."""
    if not record.name.startswith(("prefect.flow_runs", "prefect.task_runs")):
        return True
    record.exc_info, record.exc_text = None, None
    return FAILED.match(str(record.msg)) is None
