"""What `make deploy` requests from the server. tests/flows/test_servers.py runs it on a real one."""

import json
import uuid
from datetime import timedelta

import pytest
from prefect.client.schemas.objects import StateType
from prefect.server.utilities import user_templates
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import deploy
from pipeline.errors import ConfigError


def made(*words: str) -> dict[str, deploy.AutomationCore]:
    training = uuid.UUID(int=7)
    return {one.name: one for one in deploy.automations(deploy.parse(words), training)}


def test_three_missed_heartbeats_are_a_crash():
    trigger, [action] = made()[deploy.SILENT].trigger, made()[deploy.SILENT].actions
    assert trigger.within == timedelta(seconds=90)
    assert trigger.after == {"prefect.flow-run.heartbeat", "prefect.flow-run.Running"}
    assert "prefect.flow-run.heartbeat" in trigger.expect
    assert trigger.match_related.root == {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.dlrm"}
    assert trigger.for_each == {"prefect.resource.id"}
    assert action.state == StateType.CRASHED
    assert made("silent_seconds=35")[deploy.SILENT].trigger.within == timedelta(seconds=35)


def test_every_state_is_covered():
    """A healthy run in a state that is missing here would be marked as crashed."""
    names = {kind.value.capitalize() for kind in StateType}
    assert {f"prefect.flow-run.{name}" for name in names} <= made()[deploy.STUCK].trigger.expect
    assert "prefect.flow-run.heartbeat" in made()[deploy.STUCK].trigger.expect
    assert names - {"Running", "Pending", "Cancelling"} <= {*deploy.WAITING, *deploy.ENDED}


def test_chaining_is_off_by_default():
    assert not made()[deploy.CHAINED].enabled
    assert made("chain=true")[deploy.CHAINED].enabled


@pytest.mark.parametrize("given", [{}, {"overrides": None}, {"overrides": {"training.epochs": 2, "name": 'a"b'}}])
def test_a_chained_training_has_the_parameters_of_the_ingest(given):
    """Renders Prefect's own templates, as the server does."""
    [action] = made()[deploy.CHAINED].actions
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
        ("colour=red", "argument 'colour': expected one of trainings, chain, silent_seconds, pending_seconds, got 'colour'. Correct it."),
    ],
)  # fmt: skip
def test_a_wrong_word_is_refused(word, sentence):
    with pytest.raises(ConfigError) as refused:
        deploy.parse([word])
    assert str(refused.value) == sentence


def test_without_a_server_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert deploy.main([]) == 1
    assert (
        capsys.readouterr().err
        == "error: PREFECT_API_URL: expected the address of a running server, got none. Start one with `make ui`, or name another one's: export PREFECT_API_URL=http://HOST:PORT/api.\n"
    )
