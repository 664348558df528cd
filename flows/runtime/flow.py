"""What a flow file takes from here: the decorator and the workspace. Commands that only read do without Prefect."""

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from flows.runtime.environment import quiet_libraries
from flows.runtime.placeholders import complete, complete_logs, given_path, note_path
from flows.runtime.redaction import hide, hide_in_logs, remember
from pipeline.config import RunConfig, load
from pipeline.config.draft import Draft
from pipeline.config.files import home_path
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.console import Console, one_line
from pipeline.jobs.notify import Notifier, describe_failure, find_stale, list_messages, read_settings
from pipeline.jobs.transient import explain_request, is_transient
from pipeline.jobs.workspace import Workspace

LOGGERS = ("dlrm", "prefect.flow_runs", "prefect.task_runs")
"""What runs log to."""
RETRY_DELAYS_SECONDS = (60.0, 300.0, 1800.0)
"""How long a deployed run waits before it tries again, by attempt."""
without_prefect = False
"""Set by the command line before it imports a flow file: flows are plain functions then, and steps plain calls."""


def flow(name: str, read: Callable[..., RunConfig] = load) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a Prefect flow, with runs named after the flow and its config.

    Args:
        read: Makes the flow's config of a file and overrides.
    """
    if without_prefect:
        return lambda function: function
    from flows.runtime.console import PrivateFlow

    def tell(given: Mapping[str, Any], error: Exception) -> None:
        notify_finished(name, given, error, read)

    return lambda function: PrivateFlow(notify_at_end(name, explaining(try_again(function, tell)), read), name=name)


def explaining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a run end with one sentence for an error of MLflow's client. The command line does so for commands."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (told := explain_request(error)) is error:
                raise
            raise told from None

    return run


def try_again(
    function: Callable[..., Any], tell: Callable[[Mapping[str, Any], Exception], None] = lambda given, error: None
) -> Callable[..., Any]:
    """Makes a deployed run repeat its work after a transient failure. Finished work is skipped.

    Nobody watches a deployed run. A command shows the failure at once, and its user decides. A run with `force=true` is
    never tried again, because it would repeat finished work.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        forced = signature.bind(*args, **kwargs).arguments.get("force", False)
        for wait in () if forced else RETRY_DELAYS_SECONDS:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not is_deployed() or not is_transient(error):
                    raise
                from flows.runtime.console import PrefectConsole

                PrefectConsole().log.warning("%s The run tries again in %.0f s.", one_line(error), wait)
                tell(signature.bind(*args, **kwargs).arguments, error)  # the next attempt skips what is finished
            time.sleep(wait)
        return function(*args, **kwargs)

    return run


def notify_at_end(name: str, function: Callable[..., Any], read: Callable[..., RunConfig] = load) -> Callable[..., Any]:
    """Sends notifications when a run ends (see `home/notify.yaml`), except for runs at a terminal.

    A run inside another one leaves that to the outer one.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from flows.runtime.ending import is_inside_another

        watched = sys.stderr.isatty() and not is_deployed()
        if watched or is_inside_another():
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        note_path(given.arguments.get("config"))
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            notify_failure(name, given.arguments, error, read)
            raise
        notify_result(name, given.arguments, result, read)
        return result

    return run


def notify_failure(
    name: str, given: Mapping[str, Any], error: Exception, read: Callable[..., RunConfig] = load
) -> None:
    """Sends the notification of a failed run, and those of what it finished before."""
    config = given.get("config", "")
    with suppress(ConfigError):  # a home of that name cannot be
        home = config.home_path if isinstance(config, RunConfig) else home_path(".dlrm")
        with suppress(ContractError):
            home = read(config, given.get("overrides")).home_path
        shown = str(config)
        if isinstance(config, RunConfig | Draft):  # of a command, which has read the file
            shown = given_path(config.name)
        text = str(error) if isinstance(error, ContractError) else one_line(error)
        Notifier(home, logging.getLogger("dlrm").warning).send(
            [describe_failure(name, shown, complete(hide(text)), isinstance(error, ConfigError))]
        )
    notify_finished(name, given, error, read)


def notify_finished(name: str, given: Mapping[str, Any], error: Exception, read: Callable[..., RunConfig]) -> None:
    """Sends notifications of what a run finished before an error; see `keep_if_failed`."""
    for result in getattr(error, "finished", ()):
        notify_result(name, given, result, read)


def notify_result(name: str, given: Mapping[str, Any], result: Any, read: Callable[..., RunConfig] = load) -> None:
    """Sends notifications of held days, rejected models, and of a champion that is stale or badly calibrated."""
    warn = logging.getLogger("dlrm").warning
    try:
        config = given["config"]
        if isinstance(config, Draft) or not isinstance(result, Mapping):
            return
        config = read(config, given.get("overrides"))
        settings = read_settings(config.home_path)
        if settings is None:
            return
        gate = config.gate
        messages = [*list_messages(name, config.name, result, (gate.calibration_low, gate.calibration_high))]
        if name in ("ingest", "train", "end-to-end", "recurring", "score"):  # every night, one of them runs
            messages += filter(None, [find_stale(Workspace(config), settings.stale_days)])
        Notifier(config.home_path, warn).send([one.model_copy(update={"text": complete(one.text)}) for one in messages])
    except Exception as error:  # the run has its own result
        warn("no message was sent: %s", hide(one_line(error)))


def is_deployed() -> bool:
    """Whether a worker started this run from a deployment."""
    from prefect.runtime import deployment

    return deployment.id is not None


def open_console(config: RunConfig | Draft) -> Console:
    """Returns where a command reports, which shows no credentials of its config."""
    quiet_libraries()
    remember(config)
    hide_in_logs(*LOGGERS)
    complete_logs(*LOGGERS)
    if without_prefect:
        return Console()
    from flows.runtime.console import PrefectConsole

    return PrefectConsole()


def open_workspace(config: RunConfig) -> Workspace:
    """Opens the workspace of a command."""
    return Workspace(config, open_console(config))
