# SPDX-License-Identifier: Apache-2.0
"""Every kind of target receives what it understands: a real server, a real process."""

from __future__ import annotations

import email
import hashlib
import hmac
import json
from email import policy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.node.notifying import SIGNATURE, send_all
from slurm_health.node.rules.notices import Batch, EventKind, NodeEvent
from slurm_health.node.rules.settings import Notify, Target
from tests.support.listener import Listener
from tests.support.supervised import write_executable

SECRET = "not-to-be-seen-4711"
HOSTILE = "held by <!channel> & [click](http://evil)``` @all\nBcc: all@example.org"


def event(node: str = "n3", kind: EventKind = EventKind.DRAINED, text: str = "lost") -> NodeEvent:
    return NodeEvent(
        id=node, kind=kind, node=node, time_s=1_763_661_234.0, text=text, checks=("gpu",), job=4711
    )


def sent(*events: NodeEvent, **target: Any) -> tuple[str, str]:
    """Send events as one message; what came back, and why it was not taken."""
    target = {"limit_s": 50, **target}
    settings = Notify(cluster="c1", targets={"ops": msgspec.convert(target, Target)})
    batch = Batch(target="ops", events=events or (event(),))
    ((_, answer, why_not),) = send_all([batch], settings)
    return answer, why_not


def private(tmp_path: Path, text: str = SECRET, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return str(path)


def test_a_webhook_receives_json_with_all_nodes_in_one(listener: Listener) -> None:
    answer, why_not = sent(event("n3"), event("n4"), url=f"{listener.url}/hook")

    assert (answer, why_not) == ("http://127.0.0.1 answered 200: ok", "")
    (request,) = listener.received
    assert request["path"] == "/hook"
    assert request["headers"]["Content-Type"] == "application/json"
    document = json.loads(request["body"])
    assert document["kind"] == "drained"
    assert (document["cluster"], document["nodes"], document["count"]) == ("c1", "n[3-4]", 2)
    assert [each["node"] for each in document["events"]] == ["n3", "n4"]
    assert document["first"] == "2025-11-20T17:53:54Z"


def test_a_secret_goes_as_a_header_and_nowhere_else(listener: Listener, tmp_path: Path) -> None:
    answer, _ = sent(url=listener.url, secret_file=private(tmp_path))

    (request,) = listener.received
    assert request["headers"]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in answer + request["body"]


def test_a_signature_is_that_of_the_body(listener: Listener, tmp_path: Path) -> None:
    sent(url=listener.url, secret_file=private(tmp_path), sign=True)

    (request,) = listener.received
    key, body = SECRET.encode(), request["body"].encode()
    expected = f"sha256={hmac.new(key, body, hashlib.sha256).hexdigest()}"
    assert request["headers"][SIGNATURE] == expected
    assert "Authorization" not in request["headers"]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (SECRET, 0o644, "closed to others: chown root, chmod 600"),
        ("", 0o600, "must hold one word"),
        ("a b", 0o600, "must hold one word"),
    ],
)
def test_a_secret_that_others_can_read_or_that_is_none_is_not_used(
    listener: Listener, tmp_path: Path, text: str, mode: int, why: str
) -> None:
    _, why_not = sent(url=listener.url, secret_file=private(tmp_path, text, mode))

    assert why in why_not
    assert listener.received == []


def test_a_url_that_is_a_secret_stays_one_when_it_fails(listener: Listener, tmp_path: Path) -> None:
    listener.answer(403, "invalid_token")
    _, why_not = sent(url_file=private(tmp_path, f"{listener.url}/{SECRET}"))

    assert listener.received[0]["path"] == f"/{SECRET}"
    assert why_not == "http://127.0.0.1 answered 403: invalid_token"


@pytest.mark.parametrize(
    "url",
    [f"http://ops:{SECRET}@127.0.0.1/hook", f"http://127.0.0.1:{SECRET}/", f"http://[{SECRET}"],
)
def test_a_url_that_is_none_is_not_told_with_its_error(tmp_path: Path, url: str) -> None:
    _, why_not = sent(url_file=private(tmp_path, url))

    assert why_not
    assert SECRET not in why_not


def test_a_redirect_takes_neither_message_nor_secret_elsewhere(
    listener: Listener, tmp_path: Path
) -> None:
    listener.answer(302, "", f"{listener.url}/elsewhere")
    _, why_not = sent(url=f"{listener.url}/hook", secret_file=private(tmp_path))

    assert "answered 302" in why_not
    assert [each["path"] for each in listener.received] == ["/hook"]


def test_where_nobody_listens_is_said(tmp_path: Path) -> None:
    _, why_not = sent(url="http://127.0.0.1:1/hook")

    assert "http://127.0.0.1 cannot be reached: [Errno 111] Connection refused" in why_not


def test_chats_receive_their_bodies_and_nothing_in_them_is_a_mention_or_a_link(
    listener: Listener,
) -> None:
    for format_ in ("slack", "teams"):
        sent(event(text=HOSTILE), url=listener.url, format=format_)

    slack, teams = listener.documents
    head, block, end = slack["text"].split("```")  # code: no mention of Mattermost's, no markdown
    assert (head, end) == ("slurm-health: c1: n3: drained\n", "")
    assert block.startswith("\n2025-11-20T17:53:54Z n3: held by &lt;!channel&gt; &amp; [click]")
    (card,) = teams["attachments"]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    blocks = card["content"]["body"]
    assert {each["type"] for each in blocks} == {"RichTextBlock"}  # knows no markdown
    assert "n3: held by <!channel>" in blocks[1]["inlines"][0]["text"]


def test_a_release_resolves_the_alert_of_the_drain(listener: Listener) -> None:
    for kind in (EventKind.DRAINED, EventKind.RELEASED):
        sent(event(kind=kind), url=f"{listener.url}/api/v2/alerts", format="alertmanager")

    (fired,), (resolved,) = listener.documents
    expected = {"alertname": "SlurmHealthDrained", "cluster": "c1", "node": "n3"}
    assert fired["labels"] == resolved["labels"] == expected
    assert fired["endsAt"] > fired["startsAt"]
    assert resolved["endsAt"] == fired["startsAt"]
    assert fired["annotations"]["description"] == "lost"


def test_a_collector_receives_a_log_record_of_each_event(listener: Listener) -> None:
    events = (event("n3"), event("n4", text=HOSTILE))
    sent(*events, url=f"{listener.url}/v1/logs", format="otlp")
    sent(event(kind=EventKind.RELEASED), url=f"{listener.url}/v1/logs", format="otlp")

    drained, released = listener.documents
    for document in listener.documents:
        for each in document["resourceLogs"]:
            (scope,) = each["scopeLogs"]
            (record,) = scope["logRecords"]
            assert record["timeUnixNano"] == "1763661234000000000"
    hosts = [attributes(each["resource"])["host.name"] for each in drained["resourceLogs"]]
    assert hosts == ["n3", "n4"]
    record = drained["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert (record["severityNumber"], record["severityText"]) == (13, "WARN")
    assert record["eventName"] == "slurm_health.node.drained"
    assert record["body"] == {"stringValue": "n3 drained: lost"}
    assert attributes(record) == {
        "slurm.cluster.name": "c1",
        "slurm.job.id": "4711",
        "slurm_health.checks": "gpu",
    }
    record = released["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert record["severityText"] == "INFO"


@pytest.mark.parametrize("time_s", [-1e30, 0.0, 1e30])
def test_a_clock_that_is_wrong_is_a_time_that_a_collector_can_read(
    listener: Listener, time_s: float
) -> None:
    sent(msgspec.structs.replace(event(), time_s=time_s), url=listener.url, format="otlp")

    (document,) = listener.documents
    record = document["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert 0 <= int(record["timeUnixNano"]) < 2**64


def attributes(of: Any) -> dict[str, str]:
    """Return OTLP's list of keys and values as a dictionary."""
    return {each["key"]: each["value"]["stringValue"] for each in of["attributes"]}


def test_a_mail_command_receives_a_mail_without_a_header_of_anybody_elses(tmp_path: Path) -> None:
    sendmail = write_executable(
        tmp_path / "sendmail", f'#!/bin/sh\necho "$@" >{tmp_path}/with\ncat >{tmp_path}/mail\n'
    )
    answer, why_not = sent(
        event(text=HOSTILE),
        command=[str(sendmail), "-t"],
        format="mail",
        mail_to=["ops@example.org"],
        mail_from="slurm@example.org",
    )

    assert (answer, why_not) == (f"{sendmail} took it", "")
    mail = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=policy.default)
    assert (mail["To"], mail["From"]) == ("ops@example.org", "slurm@example.org")
    assert mail["Subject"] == "slurm-health: c1: n3: drained"
    assert mail["Bcc"] is None
    assert "n3: held by <!channel>" in mail.get_content()
    assert (tmp_path / "with").read_text() == "-t\n"


def test_a_ticket_command_receives_the_evidence(tmp_path: Path) -> None:
    opener = write_executable(tmp_path / "ticket", f"#!/bin/sh\ncat >{tmp_path}/t\necho OPS-12\n")
    found = msgspec.structs.replace(event(kind=EventKind.TICKET), evidence=("reset: failed",))
    answer, _ = sent(found, command=[str(opener)], events=["ticket"])

    assert answer == f"{opener} took it: OPS-12"
    document = json.loads((tmp_path / "t").read_text())
    assert document["kind"] == "ticket"
    assert document["events"][0]["evidence"] == ["reset: failed"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such queue >&2; exit 3", "ended with code 3: no such queue"),
        ("exec sleep 3600", "did not end within 1 s"),
    ],
)
def test_a_command_that_fails_or_hangs_is_told(tmp_path: Path, script: str, why: str) -> None:
    program = write_executable(tmp_path / "bad", f"#!/bin/sh\n{script}\n")
    _, why_not = sent(command=[str(program)], limit_s=1 if "sleep" in script else 50)

    assert why in why_not


def test_a_target_that_hangs_keeps_no_other_from_its_message(
    listener: Listener, tmp_path: Path
) -> None:
    hangs = write_executable(tmp_path / "hangs", "#!/bin/sh\nexec sleep 3600\n")
    targets = {
        "hangs": Target(command=(str(hangs),), limit_s=1),
        "ops": Target(url=listener.url, limit_s=50),
    }
    batches = [Batch(target=name, events=(event(),)) for name in ("hangs", "hangs", "ops", "ops")]
    outcomes = send_all(batches, Notify(targets=targets))

    assert {each.target for each, _, why_not in outcomes if why_not} == {"hangs"}
    assert len(listener.received) == 2
