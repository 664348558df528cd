"""What a flow file takes from here: the decorator and the workspace. Commands that only read do without Prefect."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

from flows.runtime.environment import quiet_libraries
from flows.runtime.private import hide_in_logs, remember
from pipeline.config import RunConfig
from pipeline.config.draft import Draft
from pipeline.jobs.console import Console, one_line
from pipeline.jobs.transient import is_transient
from pipeline.jobs.workspace import Workspace

LOGGERS = ("dlrm", "prefect.flow_runs", "prefect.task_runs")
"""What runs log to."""
WAITS = (60.0, 300.0, 1800.0)
"""Seconds before a deployed run tries again, by attempt."""
without_prefect = False
"""Set by the command line before it imports a flow file: flows are plain functions then, and steps plain calls."""


def flow(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a Prefect flow, with runs named after the flow and its config."""
    if without_prefect:
        return lambda function: function
    from flows.runtime.console import PrivateFlow

    return lambda function: PrivateFlow(try_again(function), name=name)


def try_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a deployed run repeat its work after a transient failure. Finished work is skipped.

    Nobody watches a deployed run. A command shows the failure at once, and its user decides. A run with `force=true` is
    never tried again, because it would repeat finished work.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        forced = signature.bind(*args, **kwargs).arguments.get("force", False)
        for wait in () if forced else WAITS:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not is_deployed() or not is_transient(error):
                    raise
                from flows.runtime.console import PrefectConsole

                PrefectConsole().log.warning("%s The run tries again in %.0f s.", one_line(error), wait)
            time.sleep(wait)
        return function(*args, **kwargs)

    return run


def is_deployed() -> bool:
    """Whether a worker started this run from a deployment."""
    from prefect.runtime import deployment

    return deployment.id is not None


def open_console(config: RunConfig | Draft) -> Console:
    """Returns where a command reports, which shows no credentials of its config."""
    quiet_libraries()
    remember(config)
    hide_in_logs(*LOGGERS)
    if without_prefect:
        return Console()
    from flows.runtime.console import PrefectConsole

    return PrefectConsole()


def open_workspace(config: RunConfig) -> Workspace:
    """Opens the workspace of a command."""
    return Workspace(config, open_console(config))
