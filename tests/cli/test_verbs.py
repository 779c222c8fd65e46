"""The words of the command line: what each sends, says and ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_rollout.kube_access.failures import Failure, Forbidden, Refused, Unreachable
from tests.api.objects import Object
from tests.cli.fake_cluster import call, condition, engine
from tests.kube_access.fake_connection import FakeConnection, fleet, not_found

RELEASED = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released"}
RESIDENT = dict.fromkeys(RELEASED, "Resident")


@pytest.mark.parametrize(
    ("words", "patch"),
    [
        ("pause fleet", {"execution": {"state": "Paused"}}),
        ("pause sgr/fleet --mode inplace", {"execution": {"state": "Paused", "pauseMode": "InPlace"}}),
        ("continue fleet", {"execution": {"state": "Running"}}),
        ("release fleet", {"memory": RELEASED}),
        ("release fleet --kv --graphs", {"memory": {"kvCache": "Released", "cudaGraph": "Released"}}),
        ("release fleet --kv --pause", {"memory": {"kvCache": "Released"}, "execution": {"state": "Paused"}}),
        ("resume fleet", {"memory": RESIDENT}),
        ("resume fleet --weights", {"memory": {"weights": "Resident"}}),
        ("resume fleet --continue", {"memory": RESIDENT, "execution": {"state": "Running"}}),
        (
            "weights set fleet 43 --path /models/43",
            {
                "weights": {
                    "version": "43",
                    "source": {"type": "Disk", "disk": {"path": "/models/43"}, "distributed": None, "colocated": None},
                }
            },
        ),
        ("check fleet compare --request-id 7", {"weightCheck": {"requestID": "7", "action": "Compare"}}),
        ("check fleet reset --yes --request-id 8", {"weightCheck": {"requestID": "8", "action": "Reset"}}),
        ("restart fleet --request-id 1", {"restart": {"requestID": "1"}}),
        ("flush-cache fleet --request-id 3", {"flushCache": {"requestID": "3"}}),
        ("abort fleet --request-id 4", {"abortRequests": {"requestID": "4"}}),
        ("profile fleet --request-id 2", {"profile": {"requestID": "2", "steps": 5}}),
        ("profile fleet --request-id 2 --steps 9", {"profile": {"requestID": "2", "steps": 9}}),
    ],
)
def test_patches_exactly_its_fields(words: str, patch: Object) -> None:
    connection = FakeConnection(fleet())

    result = call(connection, *words.split(), "--no-wait")

    assert result.exit_code == 0, result.output
    assert connection.patches == [{"spec": patch}]
    assert connection.queries == [{"fieldManager": "kubectl-sgrollout", "fieldValidation": "Strict"}]
    assert "generation 2, not waiting" in result.stdout


@pytest.mark.parametrize(
    "verb", ["check fleet checksum", "restart fleet", "profile fleet", "flush-cache fleet", "abort fleet"]
)
def test_makes_a_new_request_id_each_time(verb: str) -> None:
    connection = FakeConnection(fleet())

    for _ in range(2):
        call(connection, *verb.split(), "--no-wait")

    ids = [next(iter(patch["spec"].values()))["requestID"] for patch in connection.patches]
    assert len(set(ids)) == 2
    assert all(one.startswith("20260102T030405Z-") for one in ids)


def paused(generation: int = 2) -> Object:
    status = {"executionState": "Paused", "engines": [engine(0, paused=True)]}
    return fleet(generation, status, execution={"state": "Paused"})


@pytest.mark.parametrize(
    ("answers", "code", "outcome", "said"),
    [
        ([fleet(), paused()], 0, "Done", "1 of 1 engines are paused"),
        ([fleet(), fleet(3)], 1, "Failed", "spec.execution.state is Running now"),
        ([Refused("a rule's own words")], 1, "Refused", "a rule's own words"),
        ([fleet(), paused() | {"status": {}}], 3, "TimedOut", "not there after 200ms"),
        ([fleet(), Unreachable("away")], 3, "TimedOut", "no answer from the API server within 200ms"),
        ([not_found()], 4, "NotFound", "not found"),
        ([Forbidden("cannot patch")], 5, "Forbidden", "cannot patch"),
        ([Unreachable("away")], 6, "Unreachable", "away"),
        ([fleet() | {"spec": {"model": 1}}, paused()], 0, "Done", ""),
        ([fleet(), fleet() | {"spec": {"model": 1}}], 1, "Failed", "use the release of the plug-in"),
    ],
)
def test_ends_with_a_code_and_a_sentence(answers: list[Object | Failure], code: int, outcome: str, said: str) -> None:
    text = call(FakeConnection(*answers), "pause", "fleet", "--timeout", "200ms")
    scripted = call(FakeConnection(*answers), "pause", "fleet", "--timeout", "200ms", "-o", "json")

    assert (text.exit_code, scripted.exit_code) == (code, code)
    assert said in text.output
    answer = json.loads(scripted.stdout)
    assert (answer["verb"], answer["outcome"], answer["exitCode"]) == ("pause", outcome, code)
    assert said in answer["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pause", "Missing argument 'NAME'"),
        ("pause Fleet", "cannot be the name of a fleet"),
        ("pause pod/fleet", "is no SGLangRollout"),
        ("pause fleet --mode gently", "is not one of"),
        ("pause fleet --timeout never", "write 90s, 5m or 1h30m"),
        ("pause fleet --timeout 0", "more than nothing"),
        ("weights set fleet 43", "Missing option '--path'"),
        ("check fleet", "Missing argument"),
        ("check fleet reset", "add --yes"),
        ("profile fleet --steps 0", "not in the range"),
        ("status --watch", "--watch needs the NAME"),
        ("logs fleet --router --engine 1", "exclude each other"),
        ("logs fleet -f -p", "cannot be followed"),
        ("bogus", "No such command"),
    ],
)
def test_wrong_usage_sends_nothing(words: str, said: str) -> None:
    connection = FakeConnection(fleet())

    result = call(connection, *words.split())

    assert result.exit_code == 2
    assert said in result.output
    assert connection.patches == []


def test_release_of_a_running_fleet_says_how() -> None:
    refusal = Refused(
        "execution.state Running needs all of memory Resident: set execution.state Paused to release memory"
    )

    result = call(FakeConnection(refusal), "release", "fleet")

    assert result.exit_code == 1
    assert "release --pause does both" in result.output


def serving(version: str, target: str = "") -> Object:
    history = [
        {"version": "base", "path": "/models/base", "committedAt": "2026-01-01T03:04:05Z"},
        {"version": version, "path": f"/models/{version}", "committedAt": "2026-01-02T02:04:05Z"},
    ]
    weights = {"version": version, "targetVersion": target or version, "phase": "Idle", "history": history}
    return {
        "weights": weights,
        "engines": [engine(0, weightVersion=version)],
        "conditions": [condition("WeightsConsistent", True)],
    }


@pytest.mark.parametrize(
    ("words", "value", "code", "said"),
    [
        ("42", fleet(status=serving("42")), 0, "1 of 1 engines serve 42"),
        ("", fleet(status=serving("42")), 0, "1 of 1 engines serve 42"),
        ("", fleet(status=serving("42"), weights={"version": "43"}), 3, "not there"),
        ("42", fleet(2, serving("42") | {"observedGeneration": 1}), 3, "not seen the change"),
        ("43", fleet(status=serving("42")), 3, "not there"),
        ("", fleet(), 1, "name the VERSION"),
    ],
)
def test_weights_wait(words: str, value: Object, code: int, said: str) -> None:
    result = call(FakeConnection(value), "weights", "wait", "fleet", *words.split(), "--timeout", "100ms")

    assert (result.exit_code, said in result.output) == (code, True), result.output


def test_weights_history() -> None:
    value = fleet(status=serving("42"))

    text = call(FakeConnection(value), "weights", "history", "fleet").stdout.splitlines()
    items = json.loads(call(FakeConnection(value), "weights", "history", "fleet", "-o", "json").stdout)["items"]

    assert [line.split() for line in text[1:]] == [
        ["base", "1d", "/models/base"],
        ["42", "1h", "current", "/models/42"],
    ]
    assert [(item["version"], item["current"]) for item in items] == [("base", False), ("42", True)]


def pod(name: str, run: str = "") -> Object:
    status = {"containerStatuses": [{"name": "engine", "containerID": run}]}
    metadata = {"name": name, "uid": name}
    return {"metadata": metadata, "spec": {"containers": [{"name": "engine"}]}, "status": status}


def logging(**logs: Any) -> FakeConnection:
    connection = FakeConnection(fleet())
    connection.pods = [pod(name) for name in sorted(logs)]
    connection.logs = logs
    return connection


def test_logs_have_their_pod_in_front() -> None:
    connection = logging(
        e0=["2026-01-02T03:04:05.000000001Z \x1b[31mready\x1b[0m", "2026-01-02T03:04:05.000000002Z "],
        long=["2026-01-02T03:04:06.000000001Z [b]not markup[/b]"],
    )

    text = call(connection, "logs", "fleet").stdout
    lines = [json.loads(line) for line in call(connection, "logs", "fleet", "-o", "json").stdout.splitlines()]

    assert text.splitlines() == ["e0   ready", "e0   ", "long [b]not markup[/b]"]
    assert lines[2] == {
        "pod": "long",
        "container": "engine",
        "time": "2026-01-02T03:04:06.000000001Z",
        "text": "[b]not markup[/b]",
    }
    assert connection.queries[0] == {"container": "engine", "timestamps": "true", "tailLines": "100"}


@pytest.mark.parametrize(
    ("words", "query"),
    [
        ("--since 90s", {"sinceSeconds": "90"}),
        ("--since 1500ms --tail 7", {"sinceSeconds": "2", "tailLines": "7"}),
        ("-p", {"previous": "true", "tailLines": "100"}),
    ],
)
def test_logs_ask_for_what_was_chosen(words: str, query: Object) -> None:
    connection = logging(e0=[])

    assert call(connection, "logs", "fleet", *words.split()).exit_code == 0
    assert connection.queries == [{"container": "engine", "timestamps": "true"} | query]


@pytest.mark.parametrize(
    ("connection", "words", "code", "said"),
    [
        (FakeConnection(fleet()), "", 4, "no pods with rollout.sglang.io/fleet=fleet"),
        (logging(e0=[]), "-c nope", 1, "try -c with one of engine"),
        (logging(e0=Refused("waiting to start"), e1=["2026-01-02T03:04:05Z up"]), "", 0, "e0: waiting to start"),
        (logging(e0=Refused("waiting to start")), "", 1, "e0: waiting to start"),
    ],
)
def test_logs_that_are_not_there(connection: FakeConnection, words: str, code: int, said: str) -> None:
    result = call(connection, "logs", "fleet", *words.split())

    assert result.exit_code == code
    assert said in result.output


def test_followed_logs_go_on_over_restarts_and_new_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_rollout.cli.log_reader.RELIST_SECONDS", 0.2)
    first, second = "2026-01-02T03:04:05.000000001Z first", "2026-01-02T03:04:06.000000001Z second"
    connection = FakeConnection(fleet())
    connection.listings = [
        [],
        Unreachable("away"),
        [pod("e0")],  # has no container yet
        [pod("e0", "run-1")],
        [pod("e0", "run-1")],  # read to its end: not again
        [pod("e0", "run-2"), pod("e1", "run-1")],
        [],
        Forbidden("enough"),
    ]
    connection.logs = {"e0": [first, second], "e1": [second]}

    result = call(connection, "logs", "fleet", "-f")

    assert result.exit_code == 5
    # The second run is asked for from the last line on, which is not shown twice.
    assert result.stdout.splitlines() == ["e0 first", "e0 second", "e1 second"]
    assert [query.get("sinceTime") for query in connection.queries] == [None, "2026-01-02T03:04:06.000000001Z", None]
    assert "waiting for one" in result.stderr
    assert "away; trying again" in result.stderr
