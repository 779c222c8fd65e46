"""What people see: whole at 80 columns, true of the generation, and readable without colours."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console, RenderableType

from sglang_rollout.cli.fleet_report import parse, report
from sglang_rollout.cli.tables import fleet_view, fleets_table, one_line
from tests.api.objects import Object
from tests.cli.fake_cluster import NOW, call, condition, engine
from tests.kube_access.fake_connection import FakeConnection, fleet

LONG = "container engine ended with exit code 137 (OOMKilled): CUDA out of memory; the next restart is in 2m"


def status(**changes: Any) -> Object:
    """A fleet of two in the middle of a move, one of them broken."""
    return {
        "readyReplicas": 1,
        "routableReplicas": 1,
        "executionState": "Running",
        "memory": {"weights": "Resident", "kvCache": "Resident", "cudaGraph": "Resident"},
        "weights": {
            "version": "42",
            "targetVersion": "43",
            "phase": "Committing",
            "transaction": {"id": "t", "version": "43", "prepared": 2, "committed": 1},
        },
        "engines": [engine(0, weightVersion="42"), engine(1, ready=False, routable=False, restarts=3, message=LONG)],
        "router": {"url": "http://fleet-router.default:30000"},
        "lastWeightCheck": {
            "requestID": "7",
            "action": "Compare",
            "result": "Mismatch",
            "mismatchedEngines": ["fleet-e1"],
        },
        "conditions": [
            condition("Ready", False, "WeightsMoving", "moving to version 43"),
            condition("Degraded", True, "EngineFailing", f"fleet-e1: {LONG}"),
        ],
        **changes,
    }


def drawn(picture: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(picture)
    return out.getvalue()


def view(value: Object, width: int = 80, *, all_engines: bool = False) -> str:
    return drawn(fleet_view(report(parse(value)), NOW, all_engines=all_engines), width)


def test_all_of_it_fits_80_columns() -> None:
    text = view(fleet(replicas=2, status=status()))

    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    for said in (
        "default/fleet Not ready 4m5s old",
        "moving to version 43",
        "1/2 ready",
        "1/2 routable",
        "42 -> 43 Committing",
        "2/2 hold 43, checked",
        "1/2 serve 43",
        "the next restart is in 2m",
        "last check Compare 7: Mismatch on fleet-e1",
    ):
        assert said in words


@pytest.mark.parametrize(
    ("generation", "observed", "conditions", "ready", "said"),
    [
        (2, 2, [condition("Ready", True, "AllRoutable", "all serve 42", 2)], True, "all serve 42"),
        # Of an older generation: not ready, whatever it says.
        (2, 2, [condition("Ready", True, "AllRoutable", "all serve 42", 1)], False, "all serve 42"),
        (2, 1, [condition("Ready", True, "AllRoutable", "all serve 42", 1)], False, "has not answered the last change"),
        (1, 0, [], False, "has not looked at this fleet yet"),
    ],
)
def test_ready_is_of_the_present_generation(
    generation: int, observed: int, conditions: list[Object], ready: bool, said: str
) -> None:
    seen = report(parse(fleet(generation, status(observedGeneration=observed, conditions=conditions))))

    assert (seen.ready, said in seen.message) == (ready, True)
    assert one_line(seen).startswith(f"default/fleet {'Ready' if ready else 'NotReady'}")
    assert ("(old)" in view(fleet(generation, status(conditions=conditions)))) == (
        any(one["observedGeneration"] < generation for one in conditions)
    )


def test_a_large_fleet_shows_those_in_trouble() -> None:
    engines = [engine(index) for index in range(200)]
    engines[150] |= {"routable": False, "message": "broken"}
    value = fleet(replicas=200, status=status(engines=engines))

    assert "fleet-e150  gated" in view(value)
    assert "... and 176 more engines" in view(value)
    assert "fleet-e199" in view(value, all_engines=True)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "routable"),
        ({"paused": True}, "paused"),
        ({"paused": True, "released": ["kvCache"], "routable": False}, "released"),
        ({"routable": False}, "gated"),
        ({"routable": False, "ready": False}, "starting"),
    ],
)
def test_an_engine_is_told_in_a_word(fields: Object, word: str) -> None:
    assert f"fleet-e0  {word}" in view(fleet(status=status(engines=[engine(0, **fields)])))


def test_markup_in_messages_is_no_markup() -> None:
    conditions = [condition("Ready", False, "X", "[bold]no[/bold] [/]")]
    engines = [engine(0, message="[red]no[/red]")]

    assert "[bold]no[/bold] [/]" in view(fleet(status=status(conditions=conditions)))
    assert "[red]no[/red]" in view(fleet(status=status(engines=engines)))


def test_a_fleet_without_a_status_is_drawn() -> None:
    value = fleet()
    del value["status"]

    assert "is it running?" in view(value)
    assert "fleet" in drawn(fleets_table([report(parse(value))], NOW))


def test_list_of_fleets() -> None:
    result = call(FakeConnection(fleet(replicas=2, status=status())), "status")

    assert result.stdout.splitlines()[1].split() == [
        "fleet", "1/2", "1/2", "Running", "42", "->", "43", "4m5s", "WeightsMoving",
    ]  # fmt: skip


def test_json_of_a_fleet_keeps_its_shape() -> None:
    value = fleet(replicas=2, weights={"version": "43", "source": {"type": "Disk", "disk": {"path": "/m/43"}}})
    value["status"] |= status()

    one = json.loads(call(FakeConnection(value), "status", "fleet", "-o", "json").stdout)
    many = json.loads(call(FakeConnection(value), "status", "-o", "json").stdout)

    assert many == {"items": [one]}
    assert one.pop("status")["weights"]["transaction"]["committed"] == 1
    assert one == {
        "namespace": "default",
        "name": "fleet",
        "created": "2026-01-02T03:00:00Z",
        "generation": 1,
        "answered": True,
        "ready": False,
        "reason": "WeightsMoving",
        "message": "moving to version 43",
        "wanted": {
            "replicas": 2,
            "executionState": "Running",
            "pauseMode": "Retract",
            "memory": {"weights": "Resident", "kvCache": "Resident", "cudaGraph": "Resident"},
            "weightsVersion": "43",
            "weightsPath": "/m/43",
            "control": "Operator",
        },
    }


def test_watch_in_a_pipe_prints_a_line_for_each_change() -> None:
    changes: list[Any] = [
        fleet(status=status()),
        fleet(status=status(executionState="Paused")),
        {"type": "DELETED", "object": fleet()},
    ]
    connection = FakeConnection(fleet(status=status()), changes=changes)

    result = call(connection, "status", "fleet", "--watch")

    assert result.exit_code == 4
    assert ["state=Running" in line for line in result.stdout.splitlines()] == [True, False]
