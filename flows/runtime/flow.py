"""What a flow file takes from here: the decorator and the workspace. Commands that only read do without Prefect."""

from collections.abc import Callable
from typing import Any

from flows.runtime.environment import quiet_libraries
from pipeline.config import RunConfig
from pipeline.jobs.console import Console
from pipeline.jobs.workspace import Workspace

without_prefect = False
"""Set by the command line before it imports a flow file: flows are plain functions then, and steps plain calls."""


def flow(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a Prefect flow, with runs named after the flow and its config."""
    if without_prefect:
        return lambda function: function
    import prefect

    from flows.runtime.console import flow_run_name

    return prefect.flow(name=name, flow_run_name=flow_run_name)


def open_console() -> Console:
    """Returns where a command reports."""
    quiet_libraries()
    if without_prefect:
        return Console()
    from flows.runtime.console import PrefectConsole

    return PrefectConsole()


def open_workspace(config: RunConfig) -> Workspace:
    """Opens the workspace of a command."""
    return Workspace(config, open_console())
