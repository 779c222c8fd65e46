"""compare(): tables for each rule, and the property that its actions lead to the desired set from anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.protocol.routing import Worker
from sglang_rollout.router.membership import (
    LABEL_FLEET,
    LABEL_KEY,
    Add,
    ListedWorker,
    Remove,
    Update,
    compare,
    worker_labels,
)

FLEET = "team-a/fleet"
E0 = Worker("http://10.0.0.1:30000", "key-0", "fleet-e0", 1, "1")
E1 = Worker("http://10.0.0.2:30000", "key-1", "fleet-e1", 1, "1")


def registered(worker: Worker, worker_id: str = "a", *, fleet: str = FLEET, leaving: bool = False) -> ListedWorker:
    labels = {**worker_labels(worker, fleet), "tp_size": "1"}
    return ListedWorker(worker_id, worker.url, labels, healthy=not leaving, leaving=leaving)


FOREIGN = ListedWorker("x", "http://10.9.9.9:30000", {"tp_size": "1"}, healthy=True)


@pytest.mark.parametrize(
    ("case", "desired", "listed", "actions", "in_step"),
    [
        ("nothing", [], [], [], True),
        ("as it should be", [E0], [registered(E0)], [], True),
        ("an unhealthy one is still there", [E0], [replace(registered(E0), healthy=False)], [], True),
        ("missing", [E0, E1], [registered(E0)], [Add(E1)], False),
        ("too many", [E0], [registered(E0), registered(E1, "b")], [Remove("b", E1.url)], False),
        ("twice", [E0], [registered(E0, "a"), registered(E0, "b")], [Remove("b", E0.url)], False),
        ("key of an earlier start", [replace(E0, api_key="new")], [registered(E0)],
         [Update("a", replace(E0, api_key="new"), True)], False),
        ("other version and incarnation", [replace(E0, weight_version="2", incarnation=4)], [registered(E0)],
         [Update("a", replace(E0, weight_version="2", incarnation=4), False)], True),
        ("address of another engine before", [replace(E1, url=E0.url)], [registered(E0)],
         [Update("a", replace(E1, url=E0.url), True)], False),
        ("labels lost", [E0], [ListedWorker("a", E0.url, {}, True)], [Update("a", E0, True)], False),
        ("leaving counts as gone", [], [registered(E0, leaving=True)], [], True),
        ("leaving cannot be added yet", [E0], [registered(E0, leaving=True)], [], False),
        ("foreign", [E0], [registered(E0), FOREIGN], [Remove("x", FOREIGN.url)], False),
        ("removals come first, additions last", [replace(E0, api_key="new"), E1], [registered(E0), FOREIGN],
         [Remove("x", FOREIGN.url), Update("a", replace(E0, api_key="new"), True), Add(E1)], False),
    ],
)  # fmt: skip
def test_on_our_own_router(
    case: str, desired: list[Worker], listed: list[ListedWorker], actions: list[object], in_step: bool
) -> None:
    result = compare(desired, listed, FLEET, exclusive=True)
    assert (list(result.actions), result.in_step) == (actions, in_step), case


@pytest.mark.parametrize(
    ("case", "listed", "actions", "in_step"),
    [
        ("of nobody", [registered(E0), FOREIGN], [], True),
        ("of another fleet", [registered(E0), registered(E1, "b", fleet="team-b/fleet")], [], True),
        ("of ours, not desired", [registered(E0), registered(E1, "b")], [Remove("b", E1.url)], False),
        ("ours by address", [ListedWorker("a", E0.url, {LABEL_FLEET: "team-b/fleet"}, True)],
         [Update("a", E0, True)], False),
    ],
)  # fmt: skip
def test_on_a_router_of_somebody_elses(
    case: str, listed: list[ListedWorker], actions: list[object], in_step: bool
) -> None:
    result = compare([E0], listed, FLEET, exclusive=False)
    assert (list(result.actions), result.in_step) == (actions, in_step), case


def test_the_engine_that_must_drain_first_is_named() -> None:
    assert compare([E0], [registered(E0, leaving=True)], FLEET, exclusive=True).awaited == (E0,)


def test_labels_do_not_hold_the_key() -> None:
    assert E0.api_key not in worker_labels(E0, FLEET).values()


WORKERS = st.builds(
    Worker,
    url=st.integers(0, 5).map(lambda n: f"http://10.0.0.{n}:30000"),
    api_key=st.sampled_from(["k0", "k1", "k2"]),
    engine=st.integers(0, 3).map(lambda n: f"fleet-e{n}"),
    incarnation=st.integers(0, 3),
    weight_version=st.sampled_from(["1", "2"]),
)
SETS = st.lists(WORKERS, unique_by=lambda worker: worker.url)
FLEETS = st.sampled_from([FLEET, "team-b/fleet"])


@st.composite
def listings(draw: st.DrawFn, unique: bool = False) -> list[ListedWorker]:
    """Routers list a URL once; compare() need not rely on it."""
    entry = st.tuples(WORKERS, FLEETS, st.booleans())
    found = draw(st.lists(entry, max_size=8, unique_by=(lambda entry: entry[0].url) if unique else None))
    entries = [
        registered(worker, f"id-{number}", fleet=fleet, leaving=leaving)
        for number, (worker, fleet, leaving) in enumerate(found)
    ]
    return [replace(entry, labels={}) if draw(st.booleans()) else entry for entry in entries]


def apply(listed: list[ListedWorker], actions: tuple[object, ...]) -> list[ListedWorker]:
    """What a router lists once it has done everything and what leaves is gone."""
    entries = {entry.id: entry for entry in listed if not entry.leaving}
    for action in actions:
        match action:
            case Remove(id=worker_id):
                del entries[worker_id]
            case Update(id=worker_id, worker=worker):
                entries[worker_id] = registered(worker, worker_id)
            case Add(worker):
                assert worker.url not in {entry.url for entry in listed}, "it would answer 409"
                entries[worker.url] = registered(worker, f"id-{worker.url}")
    return list(entries.values())


@given(SETS, listings(), st.booleans())
def test_the_actions_lead_to_the_desired_set(
    desired: list[Worker], listed: list[ListedWorker], exclusive: bool
) -> None:
    first = compare(desired, listed, FLEET, exclusive)
    once = apply(listed, first.actions)
    twice = apply(once, compare(desired, once, FLEET, exclusive).actions)  # those that had to drain first
    assert compare(desired, twice, FLEET, exclusive).actions == ()
    ours = {entry.url: entry.labels[LABEL_KEY] for entry in twice if entry.labels.get(LABEL_FLEET) == FLEET}
    assert ours == {worker.url: worker_labels(worker, FLEET)[LABEL_KEY] for worker in desired}
    if exclusive:
        assert len(twice) == len(desired)


@given(SETS, listings(unique=True), st.booleans())
def test_in_step_means_exactly_the_desired_set(
    desired: list[Worker], listed: list[ListedWorker], exclusive: bool
) -> None:
    """Who gets requests is told by addresses and keys alone."""
    wanted = {worker.url: worker_labels(worker, FLEET)[LABEL_KEY] for worker in desired}
    serving = {
        entry.url: entry.labels.get(LABEL_KEY)
        for entry in listed
        if not entry.leaving and (exclusive or entry.url in wanted or entry.labels.get(LABEL_FLEET) == FLEET)
    }
    assert compare(desired, listed, FLEET, exclusive).in_step == (serving == wanted)


@given(SETS, listings(), st.booleans())
def test_what_leaves_is_never_touched(desired: list[Worker], listed: list[ListedWorker], exclusive: bool) -> None:
    leaving = {entry.id for entry in listed if entry.leaving}
    touched = {
        action.id
        for action in compare(desired, listed, FLEET, exclusive).actions
        if isinstance(action, Update | Remove)
    }
    assert not touched & leaving
