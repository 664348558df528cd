"""The end of a flow run: what came of it, and that somebody stopped it."""

import contextvars
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed

from flows.runtime.placeholders import complete, complete_error
from pipeline.errors import ContractError
from pipeline.jobs.outcome import describe_outcome

SECONDS_BETWEEN_POLLS = 5.0
FAILURE = "failed: "
"""Begins a line about an error."""
STOPPED = "Stopped by an interrupt. The same command goes on where this one ended."
others_can_cancel = False
"""Whether the run is on a lasting server, where people can cancel it. Set by the command line."""
cancelled = threading.Event()
"""Set when somebody has cancelled the run of this command at the server."""


def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a flow's function end its run in a state that says what came of it, and name the run after that.

    The state of a finished run is always called Completed. Automations wait for the event of that name.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if flow_run.id is None:
            return function(*args, **kwargs)
        for name in ("prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_shorten)
        try:
            with watching_for_cancellation():
                result = function(*args, **kwargs)
        except (KeyboardInterrupt, CancelledRun):
            return Cancelled(message=STOPPED)
        except ContractError as error:
            complete_error(error)
            raise
        short, long = describe_outcome(result)
        if short:
            with suppress(Exception), get_client(sync_client=True) as client:  # a name fails no finished run
                client.update_flow_run(UUID(flow_run.id), name=f"{flow_run.name}: {short}")
        return Completed(data=result, message=long or None)

    return run


def is_inside_another() -> bool:
    """Whether the flow run at hand is part of another. Prefect asks the server for the id of that one."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.parent_task_run_id is not None


def _shorten(record: logging.LogRecord) -> bool:
    """Replaces Prefect's lines about an error of ours, a traceback each, by the error's sentence."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ContractError):
        record.msg, record.args, record.exc_info, record.exc_text = complete(f"{FAILURE}{error}"), None, None, None
    return True


def interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an interrupted task end as Cancelled, not as Crashed with a page of log."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            return Cancelled(message=STOPPED)

    return run


def resume_interrupt(found: Any) -> Any:
    """Returns a task's result. Goes on with the interrupt that ended the task."""
    if isinstance(found, State) and found.type == StateType.CANCELLED:
        raise KeyboardInterrupt
    return found


@contextmanager
def watching_for_cancellation() -> Iterator[None]:
    """Interrupts this process if somebody cancels its run at the server. For deployed runs, the worker does this."""
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    if not (others_can_cancel and is_main) or deployment.id is not None or is_inside_another():
        yield
        return
    ended, context = threading.Event(), contextvars.copy_context()  # which server it is
    thread = threading.Thread(target=context.run, args=(_poll_run_state, UUID(flow_run.id), ended), daemon=True)
    # Not SIGINT: a command that a shell runs in the background ignores it.
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _poll_run_state(run: UUID, ended: threading.Event) -> None:
    while not ended.wait(SECONDS_BETWEEN_POLLS):
        with suppress(Exception), get_client(sync_client=True) as client:  # an unreachable server cancels nothing
            state = client.read_flow_run(run).state
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED) and not ended.is_set():
                cancelled.set()
                os.kill(os.getpid(), signal.SIGUSR1)
                return
