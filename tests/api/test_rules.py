"""Every admission rule, both ways, on a real API server."""

from __future__ import annotations

import itertools

import pytest

from sglang_rollout.api.rule_index import PlacedRule, placed_rules
from tests.api.objects import rollout
from tests.api.resource_api import ResourceApi
from tests.api.rule_cases import CASES, Case

PLACED = placed_rules()
_numbers = itertools.count()


def places(case: Case) -> list[PlacedRule]:
    found = [p for p in PLACED if p.rule.id == case.rule and case.path in ("", p.path)]
    assert len(found) == 1, f"{case.title}: {len(found)} places, give the case a path"
    return found


@pytest.mark.parametrize("placed", PLACED, ids=lambda placed: f"{placed.path}:{placed.rule.id}")
def test_every_rule_is_tried_both_ways(placed: PlacedRule) -> None:
    outcomes = {case.accepted for case in CASES if places(case) == [placed]}

    assert outcomes == {True, False}


def test_rule_ids_are_unique() -> None:
    rules = {(placed.rule.id, placed.rule.expression) for placed in PLACED}

    assert len(rules) == len({rule_id for rule_id, _ in rules})


@pytest.mark.apiserver
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_rule(case: Case, resources: ResourceApi) -> None:
    if case.before is None:
        response = resources.create(rollout(case.name, **case.spec), dry_run=True)
    else:
        name = f"{case.name}-{next(_numbers)}"
        created = resources.create(rollout(name, **case.before))
        assert created.is_success, created.json()["message"]
        after = rollout(name, **case.spec)
        after["metadata"]["resourceVersion"] = created.json()["metadata"]["resourceVersion"]
        response = resources.replace(after, dry_run=True)
        resources.delete(name)

    if case.accepted:
        assert response.is_success, response.json()["message"]
        return
    assert response.status_code == 422, response.text
    rule = places(case)[0].rule
    assert rule.message in response.json()["message"]
