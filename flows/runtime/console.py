"""The console in Prefect: its run log, its artifacts, and a task for each step."""

import contextvars
import datetime
import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect import Flow, get_run_logger, tags, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.assets import Asset, AssetProperties, materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterTags,
)
from prefect.context import FlowRunContext, TagsContext
from prefect.exceptions import CancelledRun, MissingContextError
from prefect.runtime import flow_run
from prefect.utilities.callables import ParameterSchema, parameter_schema
from prefect.utilities.hashing import file_hash

from flows.runtime.dlrm import commands
from flows.runtime.ending import interruptible, reporting, resume_interrupt
from flows.runtime.redaction import hide, hiding, mask
from pipeline.config import RunConfig
from pipeline.config.draft import Draft
from pipeline.jobs.console import SECONDS_BETWEEN_LINES, UNITS, Console, Logger, Progress, Step

SECONDS_TO_END = 5.0
"""How long to wait at exit for the last progress update to be sent."""
LONGEST_NAME = 120
PAGE = 200
"""Flow runs in one answer of the server."""
TAG = "dlrm"
"""Tag of all our flow runs. For deployments, prefect.yaml sets it."""
R = TypeVar("R")


class PrefectConsole(Console):
    """Reports to the Prefect run at hand."""

    @property
    def log(self) -> Logger:
        """The log of the task or flow run; Python's outside of one."""
        try:
            return get_run_logger()
        except MissingContextError:
            return super().log

    def progress(self, unit: str = "rows", quiet: bool = False) -> Progress:
        """A progress bar, also on the run's page."""
        logger = self.log
        return Progress(None if quiet else logger, unit, RunPage(logger, unit))

    def run(self, step: Step, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Runs a step as a task. Prefect's cache stays out: the warehouse and the registry know what is done.

        Task runs do without our tag. Prefect would ask the server for the limit of each tag before a task, and at the
        begin of a run SQLite often refuses that for two seconds.
        """
        with TagsContext(current_tags=TagsContext.get().current_tags - {TAG}):
            return resume_interrupt(task_of(step, function, args[0])(*args, **kwargs))

    def clear_history(self, before: datetime.datetime, dry_run: bool) -> int:
        """Removes ended runs of our flows from the Prefect server's database, with their task runs and logs.

        Our runs have our tag and the name of one of our flows. Other runs on the same server stay, also runs from
        before the tag and other projects' flows of the same name.
        """
        ended = FlowRunFilter(end_time=FlowRunFilterEndTime(before_=before), tags=FlowRunFilterTags(all_=[TAG]))
        ours = FlowFilterName(any_=[name.replace("_", "-") for name in commands()])
        count = 0
        with get_client(sync_client=True) as client:
            while runs := client.read_flow_runs(
                flow_filter=FlowFilter(name=ours),
                flow_run_filter=ended,
                limit=PAGE,
                offset=count if dry_run else 0,
            ):
                count += len(runs)
                for run in [] if dry_run else runs:
                    client.delete_flow_run(run.id)
        return count

    def show_text(self, kind: str, name: str, text: str, description: str = "") -> None:
        """A markdown artifact."""
        create_markdown_artifact(hide(text), key=artifact_key(kind, name), description=description or None)

    def show_table(self, kind: str, name: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        """A table artifact."""
        shown = [{key: "" if value is None else hide(f"{value}") for key, value in row.items()} for row in rows]
        create_table_artifact(shown, key=artifact_key(kind, name), description=description)

    def show_link(self, kind: str, name: str, address: str, text: str, description: str) -> None:
        """A link artifact."""
        create_link_artifact(hide(address), hide(text), key=artifact_key(kind, name), description=description)


class PrivateFlow(Flow[..., Any]):
    """A flow that keeps credentials in its parameters and errors out of Prefect's database."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        source = inspect.getsourcefile(inspect.unwrap(fn))  # else Prefect takes the wrapper's file
        own = {"flow_run_name": flow_run_name, "version": file_hash(source) if source else None}
        super().__init__(_without_kinds(fn), **own | options)
        for name in ("parameters", "__signature__"):  # both without kinds
            delattr(self, name)
        functools.update_wrapper(self, fn)
        self.fn = reporting(hiding(fn))

    @functools.cached_property
    def parameters(self) -> ParameterSchema:  # type: ignore[override]
        """What the form of a deployment shows. For a whole config this takes a tenth of a second, so only on demand."""
        return parameter_schema(self.fn)

    def with_options(self, **options: Any) -> "PrivateFlow":
        """A copy with other options, which is private, too. Prefect makes a plain flow."""
        copy = super().with_options(**options)
        copy.__class__ = PrivateFlow
        return cast(PrivateFlow, copy)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the flow, with our tag on its run. An interrupt ends the run and those around it."""
        try:
            with tags(TAG):
                return super().__call__(*args, **options)
        except CancelledRun:
            raise KeyboardInterrupt from None

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """What Prefect stores and shows."""
        shown: dict[str, Any] = mask(super().serialize_parameters(parameters))
        return shown


def _without_kinds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with the same parameters, whose kinds are unknown."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=bare)  # type: ignore[attr-defined]
    return call


def task_of(step: Step, function: Callable[..., Any], holder: Any) -> Any:
    """A step as a Prefect task. Steps that make something materialize an asset."""
    options: dict[str, Any] = {"cache_policy": NO_CACHE, "task_run_name": step.name}
    if step.makes is None:
        return task(interruptible(hiding(function)), **options)
    config = holder.config
    asset = table_asset(config) if step.makes == "table" else model_asset(config)
    inputs: list[str | Asset] | None = [table_asset(config)] if step.reads == "table" else None
    return materialize(asset, by="dlrm-pipeline", asset_deps=inputs, **options)(interruptible(hiding(function)))


def flow_run_name() -> str:
    """Name of a Prefect run: the flow, its config, and what was given besides. The end adds what came of it."""
    given = dict(flow_run.parameters)
    config = given.pop("config", "")
    name = config.name if isinstance(config, RunConfig | Draft) else str(config)
    overrides = mask({"overrides": given.pop("overrides", None) or {}})["overrides"]
    context = FlowRunContext.get()
    signature = {} if context is None or context.flow is None else inspect.signature(context.flow.fn).parameters
    usual = {key: parameter.default for key, parameter in signature.items()}
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items()]
    words += [f"{key}={value}" for key, value in given.items() if value != usual.get(key) and key != "snapshot_id"]
    shown = [f"{flow_run.flow_name} {name.removeprefix('configs/').removesuffix('.yaml')}", *words]
    return hide(" ".join(shown))[:LONGEST_NAME]


class RunPage:
    """Progress artifacts of the run that this belongs to.

    A thread posts the newest figures. An unreachable server delays nobody; figures that it misses are dropped. The
    artifacts of work that fails stay and show how far it got.
    """

    def __init__(self, logger: Logger, unit: str) -> None:
        self.logger, self.unit = logger, unit
        self.newest: dict[str, tuple[float, str]] = {}
        self.posted: dict[str, tuple[float, str]] = {}
        self.made: dict[str, UUID] = {}
        self.done = False
        self.ended = threading.Event()
        context = contextvars.copy_context()  # holds the run that the artifacts belong to
        self.thread = threading.Thread(target=context.run, args=(self._post_all,), daemon=True)

    def show(self, what: str, done: int, total: int, note: str) -> None:
        """Keeps the newest figures for the thread."""
        share = min(100.0 * done / total, 100.0) if total else 100.0
        self.newest[what] = (share, f"{done:,} of {total:,} {UNITS.get(what, self.unit)}{f', {note}' if note else ''}")
        if not self.thread.ident:
            self.thread.start()

    def close(self, done: bool) -> None:
        """Removes the artifacts of finished work, else sends the last figures. Waits a moment for the server."""
        self.done = done
        self.ended.set()
        if self.thread.ident:
            self.thread.join(SECONDS_TO_END)

    def _post_all(self) -> None:
        over = False
        while not over:
            over = self.ended.wait(SECONDS_BETWEEN_LINES)
            if over and self.done:
                self._remove()
                return
            for what, figures in dict(self.newest).items():
                if self.posted.get(what) != figures:
                    try:
                        self._post(what, *figures)
                        self.posted[what] = figures
                    except Exception as error:  # the server does not take it; later figures may arrive
                        self.logger.debug("progress of %s is not on the run's page: %s", what, error)

    def _remove(self) -> None:
        """Removes finished progress bars. They crowd out the artifacts of the run."""
        try:
            with get_client(sync_client=True) as client:
                for made in self.made.values():
                    client.delete_artifact(made)
        except Exception as error:  # they stay
            self.logger.debug("progress stays on the run's page: %s", error)

    def _post(self, what: str, share: float, text: str) -> None:
        if what in self.made:
            update_progress_artifact(self.made[what], share, text)
        else:
            made: Any = create_progress_artifact(share, artifact_key("progress", what), text)
            self.made[what] = made


def artifact_key(kind: str, name: str) -> str:
    """Key of a Prefect artifact, which takes lower-case letters, digits and dashes.

    Example:
        >>> artifact_key("report", "flights_daily")
        'report-flights-daily'
    """
    return f"{kind}-{re.sub('[^a-z0-9]+', '-', name.lower())}"


def table_asset(config: RunConfig) -> Asset:
    """The run's table as Prefect knows it."""
    about = "Labelled samples by day, in the Iceberg warehouse."
    return Asset(
        key=f"iceberg://{config.warehouse.namespace}/{config.name}",
        properties=AssetProperties(name=f"table {config.name}", description=about),
    )


def model_asset(config: RunConfig) -> Asset:
    """The run's registered model as Prefect knows it."""
    about = "Versions in MLflow's registry. Takes raw rows and returns probabilities."
    return Asset(
        key=f"mlflow://models/{re.sub('[^A-Za-z0-9_.-]+', '-', config.model_name)}",  # few characters are allowed
        properties=AssetProperties(name=f"model {config.model_name}", description=about),
    )
