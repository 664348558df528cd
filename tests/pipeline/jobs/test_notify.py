"""Messages about what needs a person: once a cause, with the remedy, and never at the expense of the run."""

import datetime
import http.server
import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.jobs import notify
from pipeline.jobs.notify import Message, Notifier, describe_failure, describe_stale, list_messages, read_settings

BOUNDS = (0.95, 1.05)
MISSING = (
    "a variable of 'notify.yaml': expected TEST_HOOK in the environment of this process, got none. "
    "Set it where commands and workers start."
)
MESSAGE = describe_failure("end-to-end", "configs/demo.yaml", "home: expected a folder, got none. Make one.")


@contextmanager
def listening(handler: Any, server: Any) -> Iterator[int]:
    with server(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_address[1]
        found.shutdown()


def write(home: Path, **settings: Any) -> None:
    (home / "notify.yaml").write_text(json.dumps(settings))


def said_by(home: Path, *messages: Message) -> tuple[int, list[str]]:
    said: list[str] = []
    return Notifier(home, said.append).send(messages), said


def test_a_webhook_gets_each_cause_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    other = MESSAGE.model_copy(update={"cause": "another"})
    write(tmp_path, addresses=["$TEST_HOOK"])
    with listening(Hook, http.server.HTTPServer) as port:
        monkeypatch.setenv("TEST_HOOK", f"json://127.0.0.1:{port}/secret")
        assert [said_by(tmp_path, one) for one in (MESSAGE, MESSAGE, other)] == [(1, []), (0, []), (1, [])]
        monkeypatch.setattr(notify, "REPEAT_AFTER", {"failure": datetime.timedelta(0)})
        assert said_by(tmp_path, MESSAGE) == (1, []), "a failure that lasts is sent again the next night"
    assert [one["title"] for one in got] == ["end-to-end configs/demo.yaml failed"] * 3
    assert "home: expected a folder, got none. Make one." in got[0]["message"]
    assert "python -m flows.end_to_end configs/demo.yaml" in got[0]["message"]


def test_a_message_about_a_wrong_config_does_not_say_that_the_same_command_goes_on() -> None:
    wrong = describe_failure("train", "mine.yaml", "key 'seed': expected a number.", wrong_config=True)
    assert wrong.text.endswith("Once that is corrected: python -m flows.train mine.yaml")
    assert "goes on where this one ended" in MESSAGE.text


def test_a_receiver_that_is_away_breaks_nothing_and_its_secret_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, addresses=["$TEST_HOOK", "json://127.0.0.1:9/secret"])
    monkeypatch.setenv("TEST_HOOK", "json://127.0.0.1:9/secret")
    said = "{} did not take the message 'end-to-end configs/demo.yaml failed': {}"
    away = said.format("json", "ConnectionError")
    assert said_by(tmp_path, MESSAGE) == (0, [said.format("$TEST_HOOK", "ConnectionError"), away])
    monkeypatch.delenv("TEST_HOOK")
    assert said_by(tmp_path, MESSAGE) == (0, [said.format("$TEST_HOOK", MISSING), away])
    assert "secret" not in caplog.text


def test_a_command_gets_the_message(tmp_path: Path) -> None:
    code = f"import os, sys; open({str(tmp_path / 'got')!r}, 'w').write(os.environ['DLRM_SUBJECT'] + sys.stdin.read())"
    write(tmp_path, command=[sys.executable, "-c", code])
    assert said_by(tmp_path, MESSAGE) == (1, [])
    assert (tmp_path / "got").read_text() == f"{MESSAGE.subject}{MESSAGE.subject}\n\n{MESSAGE.text}\n"


def test_a_mail_is_sent(tmp_path: Path) -> None:
    lines: list[str] = []

    class Mailbox(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            taking, special = False, {"DATA": b"354 go on\r\n", "QUIT": b"221 bye\r\n"}
            for raw in self.rfile:
                line = raw.decode().rstrip("\r\n")
                lines.append(line)
                if not taking or line == ".":
                    self.wfile.write(special.get(line.upper(), b"250 fine\r\n"))
                    taking = line.upper() == "DATA"

    with listening(Mailbox, socketserver.TCPServer) as port:
        write(tmp_path, addresses=[f"mailto://127.0.0.1:{port}?from=dlrm@example.org&to=ops@example.org"])
        assert said_by(tmp_path, MESSAGE) == (1, [])
    assert {f"Subject: {MESSAGE.subject}", "To: ops@example.org"} <= set(lines)


def test_only_what_is_asked_for_is_sent(tmp_path: Path) -> None:
    write(tmp_path, command=["true"], on=["rejection"])
    assert said_by(tmp_path, MESSAGE) == (0, [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"webhok": "X"}, "key 'webhok'"),
        ({"on": ["everything"]}, "key 'on.0'"),
        ({"addresses": "mailto://a"}, "key 'addresses'"),
    ],
)
def test_wrong_settings_are_named_and_break_no_run(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    write(tmp_path, **settings)
    with pytest.raises(ConfigError, match=said):
        read_settings(tmp_path)
    assert said in said_by(tmp_path, MESSAGE)[1][0]


def kinds(result: dict[str, Any]) -> list[str]:
    return [one.kind for one in list_messages("recurring", "demo", {"status": "ok"} | result, BOUNDS)]


def test_what_a_result_says_to_people() -> None:
    rejected, held = {"decision": "reject", "reason": "NE is higher."}, {"decision": "hold", "reason": "By chance."}
    day: dict[str, Any] = {"day": "2025-01-03", "champion": 3, "model": {"version": 4}}
    assert kinds(day | {"champion_eval": {"calibration": 1.01}, "gate": held}) == []
    assert kinds(day | {"champion_eval": {"calibration": 1.21}, "gate": None}) == ["calibration"]
    assert kinds(day | {"judged": {"version": 3, "gate": rejected}, "gate": held}) == ["rejection"]
    assert kinds({"model": {"version": 4}, "gate": rejected, "ingest": {"held": ["2025-01-03"]}}) == [
        "held",
        "rejection",
    ]
    assert kinds({"status": "skipped", "model": {"version": 4}, "gate": rejected}) == [], "it was sent before"
    [message] = list_messages("ingest", "demo", {"status": "ok", "held": ["2025-01-03"]}, BOUNDS)
    assert "python -m flows.ingest CONFIG day=2025-01-03 force=true" in message.text


def test_each_of_several_days_is_told() -> None:
    rejected = {"decision": "reject", "reason": "NE is higher."}

    def day(number: int, calibration: float | None, **more: Any) -> dict[str, Any]:
        quality = {"calibration": calibration, "undefined": {} if calibration else {"calibration": "no positive label"}}
        return {"status": "ok", "day": f"2025-01-0{number}", "champion": 3, "champion_eval": quality, **more}

    days = [
        day(1, 1.2), day(2, 1.0, judged={"version": 4, "gate": rejected}), day(3, 0.8),
        day(4, 1.3) | {"status": "skipped"}, day(5, None), day(6, float("nan")), day(7, 1.0),
    ]  # fmt: skip
    result = {**days[-1], "held": ["2025-01-08", "2025-01-09"], "verdicts": days}
    result["events"] = {"watched": {"held": ["2031-01-01"]}, "other": {"held": []}}
    found = [*list_messages("recurring", "demo", result, BOUNDS)]
    assert [(one.kind, one.cause) for one in found] == [
        ("held", "demo 2025-01-08"), ("held", "demo 2025-01-09"), ("held", "watched 2031-01-01"),
        ("calibration", "demo 2025-01-01"), ("rejection", "demo 4"), ("calibration", "demo 2025-01-03"),
        ("calibration", "demo 2025-01-05"), ("calibration", "demo 2025-01-06"),
    ]  # fmt: skip
    assert "watched_held" in found[2].text
    assert found[-2].subject == "demo: the champion's calibration is undefined: no positive label"


def test_a_champion_behind_its_table_is_stale() -> None:
    trained, newest = datetime.date(2025, 1, 1), datetime.date(2025, 1, 8)
    assert describe_stale("demo", 3, trained, newest, 8) is None
    message = describe_stale("demo", 3, trained, newest, 7)
    assert message is not None
    assert message.subject == "demo: the champion is 7 days behind its table"


@pytest.mark.parametrize(
    "more",
    [
        {"gate": {"decision": "reject", "reason": "NE is higher."}},
        {"day": "2025-01-03", "champion_eval": {"calibration": 1.3}},
    ],
)
def test_models_on_one_table_do_not_silence_each_other(more: dict[str, Any]) -> None:
    results = [{"status": "ok", "model": {"name": name, "version": 2}, **more} for name in ("demo", "small")]
    messages = [one for result in results for one in list_messages("train", "demo", result, BOUNDS)]
    assert len({one.cause for one in messages}) == 2
    assert [one.subject.partition(":")[0] for one in messages] == ["demo", "small"]
    stale = [describe_stale(name, 2, datetime.date(2025, 1, 1), datetime.date(2025, 2, 1), 7) for name in "ab"]
    assert len({one.cause for one in stale if one is not None}) == 2


def test_the_result_of_a_scoring_has_messages() -> None:
    """Its model is a name, without a version."""
    assert list(list_messages("score", "demo", {"status": "ok", "model": "small", "version": 3}, BOUNDS)) == []
