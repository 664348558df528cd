"""Runs that nobody begins, on a real server."""

import asyncio
import datetime
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Pending, Scheduled

from flows.ingest import ingest
from flows.stuck import stuck_runs

HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def runs(prefect):
    """Ids by name of a run that was handed out, one that is an hour late and one that is due in an hour."""

    async def make():
        now = datetime.datetime.now(datetime.UTC)
        states = {
            "handed": Pending(),
            "late": Scheduled(scheduled_time=now - HOUR),
            "due": Scheduled(scheduled_time=now + HOUR),
        }
        async with get_client() as client:
            return {
                name: (await client.create_flow_run(ingest, name=f"{name} {uuid.uuid4()}", state=state))
                for name, state in states.items()
            }

    async def remove(made):
        async with get_client() as client:
            for run in made.values():
                await client.delete_flow_run(run.id)

    made = asyncio.run(make())
    yield made
    asyncio.run(remove(made))


def test_runs_that_nobody_begins_are_named_with_their_remedy(runs):
    found = {name: (ok, what, remedy) for name, ok, what, remedy in stuck_runs(environment(), patience_seconds=0.0)}
    ok, what, remedy = found[f"run '{runs['handed'].name}'"]
    assert (ok, what.endswith(", not begun")) == (False, True)
    assert remedy == f"Its worker is gone. End it: `prefect flow-run cancel {runs['handed'].id}`, then run it again."
    ok, what, remedy = found[f"run '{runs['late'].name}'"]
    assert (ok, what.endswith(", no worker"), remedy) == (False, True, "Start one: `make worker`.")
    assert f"run '{runs['due'].name}'" not in found


def test_a_run_that_was_just_handed_out_has_time(runs):
    names = [name for name, *_ in stuck_runs(environment())]
    assert f"run '{runs['handed'].name}'" not in names
    assert f"run '{runs['late'].name}'" in names


@pytest.mark.parametrize("server", [{}, {"PREFECT_API_URL": "http://127.0.0.1:9/api"}])
def test_without_a_server_there_is_nothing_to_say(server):
    assert stuck_runs(server) == []


def environment() -> dict[str, str]:
    return {"PREFECT_API_URL": PREFECT_API_URL.value()}
