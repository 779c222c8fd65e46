"""Messages survive the wire, unknown fields are ignored, malformed ones are named."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.protocol import desired, fleet, launch, report, routing, weights, wire

MESSAGES = [
    desired.AgentDesired,
    report.AgentReport,
    report.AgentIdentity,
    routing.RouterDesired,
    routing.RouterReport,
    launch.LaunchRequest,
    launch.LaunchOrder,
    launch.EngineRecord,
    launch.KillOrder,
]


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_round_trip(cls: type, data: st.DataObject) -> None:
    message = data.draw(st.from_type(cls))
    body = wire.dumps(message)
    assert wire.dumps(wire.loads(cls, body)) == body  # as text: a number that is none is not equal to itself


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_a_batch_is_encoded_as_its_messages_are(cls: type, data: st.DataObject) -> None:
    one, other = data.draw(st.from_type(cls)), data.draw(st.from_type(cls))
    encoder = wire.BatchEncoder()
    for message in (one, other, one):
        assert b"{" + encoder.members(message, frozenset()) + b"}" == wire.dumps(message)


def test_members_that_are_filled_in_later_are_left_out() -> None:
    members = wire.BatchEncoder().members(routing.RouterDesired(7, "set", []), frozenset({"lease_term", "serial"}))
    assert members == b'"id":"set","workers":[]'


def test_names_are_camel_case_and_steps_are_numbers() -> None:
    move = weights.WeightMove("t1", weights.WeightVersion("2", "/models/v2"), weights.Step.APPLY)
    assert wire.to_wire(move) == {
        "id": "t1",
        "weights": {"version": "2", "path": "/models/v2"},
        "until": 3,
        "pauseMode": "Retract",
        "kvCache": "Flush",
        "timeoutSeconds": 300.0,
        "abort": False,
        "source": {
            "kind": "Disk",
            "senders": [],
            "transport": "Auto",
            "members": 0,
            "epoch": 0,
            "root": "",
            "peers": [],
            "allowNonfinite": False,
        },
        "verify": "Fast",
    }


def test_unknown_fields_are_ignored() -> None:
    order = wire.from_wire(launch.LaunchOrder, {"modelPath": "/m", "weightVersion": "1", "later": 1})
    assert order == launch.LaunchOrder("/m", "1")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"modelPath": "/m"}', b"\xff"])
def test_malformed_messages_are_named(body: bytes) -> None:
    with pytest.raises(wire.MalformedMessage, match="LaunchOrder"):
        wire.loads(launch.LaunchOrder, body)


def test_the_fleet_config_keeps_foreign_json() -> None:
    config = fleet.FleetConfig(
        "ns",
        "f",
        "u",
        weights.WeightVersion("1", "/m"),
        fleet.Trust("a", "i", ["c"], {"keys": [{"kid": "x"}]}),
    )
    assert cast(Any, wire.loads(fleet.FleetConfig, wire.dumps(config))) == config
