"""What `dlrm deploy setup` requests from the server. tests/flows/test_deploy.py and test_servers.py run it on real ones."""

import json
import uuid
from datetime import timedelta

import pytest
from prefect.client.schemas.objects import StateType
from prefect.server.utilities import user_templates

from flows.deployments import setup
from pipeline.errors import ConfigError

MADE = {one.name: one for one in (*setup.automations(75, 600), setup.chain(uuid.UUID(int=7)))}


def test_missed_heartbeats_are_a_crash():
    trigger, [action] = MADE[setup.SILENT].trigger, MADE[setup.SILENT].actions
    assert trigger.within == timedelta(seconds=75)
    assert trigger.after == {"prefect.flow-run.heartbeat", "prefect.flow-run.Running"}
    assert "prefect.flow-run.heartbeat" in trigger.expect
    [tag] = trigger.match_related
    assert tag.root == {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.dlrm"}
    assert trigger.for_each == {"prefect.resource.id"}
    assert action.state == StateType.CRASHED


def test_a_crashed_run_starts_again_once_unless_something_else_happened_to_it():
    """A worker may report a crash twice: the second report would end a run that has been started again meanwhile."""
    trigger, [action] = MADE[setup.AGAIN].trigger, MADE[setup.AGAIN].actions
    assert trigger.after == {"prefect.flow-run.Crashed"}
    others = {f"prefect.flow-run.{kind.value.capitalize()}" for kind in StateType} - trigger.after
    assert others <= trigger.expect
    assert not trigger.after & trigger.expect
    assert trigger.match.root["prefect.run-count"] == "1"  # its second attempt has another number
    assert {one.root["prefect.resource.role"] for one in trigger.match_related} == {"tag", "deployment"}
    assert (action.state, action.name) == (StateType.SCHEDULED, "AwaitingRetry")
    silent = MADE[setup.SILENT].trigger.within
    assert (silent + trigger.within).total_seconds() <= 100  # two minutes, less what a worker needs to start it


def test_every_state_is_covered():
    """A healthy run in a state that is missing here would be marked as crashed."""
    names = {kind.value.capitalize() for kind in StateType}
    assert {f"prefect.flow-run.{name}" for name in names} <= MADE[setup.STUCK].trigger.expect
    assert "prefect.flow-run.heartbeat" in MADE[setup.STUCK].trigger.expect
    assert names - {"Running", "Pending", "Cancelling"} <= {*setup.WAITING, *setup.ENDED}


def test_chaining_is_off_by_default():
    assert not MADE[setup.CHAINED].enabled


@pytest.mark.parametrize("given", [{}, {"overrides": None}, {"overrides": {"training.epochs": 2, "name": 'a"b'}}])
def test_a_chained_training_has_the_parameters_of_the_ingest(given):
    """Renders Prefect's own templates, as the server does."""
    [action] = MADE[setup.CHAINED].actions
    assert action.parameters is not None
    template = action.parameters["overrides"]["value"]["template"]
    user_templates.validate_user_template(template)
    run = type("FlowRun", (), {"parameters": given})()
    text = user_templates.render_user_template_sync(template, {"flow_run": run})
    assert json.loads(text) == (given.get("overrides") or {})


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("chain=maybe", "argument 'chain': expected a valid boolean, unable to interpret input, got 'maybe'. Correct it."),
        ("trainings=0", "argument 'trainings': expected greater than 0, got 0. Correct it."),
        ("silent_seconds=5", "argument 'silent_seconds': expected greater than or equal to 10, got 5. Correct it."),
        ("colour=red", "argument 'colour': expected one of trainings, chain, silent_seconds, pending_seconds, got 'colour'. Correct it."),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused(word, sentence):
    with pytest.raises(ConfigError) as refused:
        setup.parse([word], setup.Settings)
    assert str(refused.value) == sentence
