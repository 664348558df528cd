"""What a flow file takes from here: the decorator and the workspace. Commands that only read do without Prefect."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flows.runtime.environment import quiet_libraries
from flows.runtime.private import hide_in_logs, remember
from pipeline.config import RunConfig
from pipeline.config.draft import Draft
from pipeline.jobs.console import Console
from pipeline.jobs.workspace import Workspace

LOGGERS = ("dlrm", "prefect.flow_runs", "prefect.task_runs")
"""What runs log to."""
without_prefect = False
"""Set by the command line before it imports a flow file: flows are plain functions then, and steps plain calls."""


def flow(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a Prefect flow, with runs named after the flow and its config."""
    if without_prefect:
        return lambda function: function
    from flows.runtime.console import PrivateFlow

    return partial(PrivateFlow, name=name)


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
