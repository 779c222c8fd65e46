"""When an engine counts as wedged."""

import pytest

from sglang_rollout.agent.probe import WedgeWatch

DEADLINE = 60.0
# (second, counter) at each look; "send" where a probe is due, "wedged" where the engine is judged.
Looks = list[tuple[float, float | None]]


def judged(looks: Looks, answers_at: float | None = None) -> list[tuple[str, float]]:
    watch, seen = WedgeWatch(), []
    for now, counter in looks:
        if answers_at is not None and watch.probe_at is not None and now >= answers_at:
            watch.progressed(now)
            answers_at = None
        watch.look(counter, now)
        if watch.wedged(now, DEADLINE):
            seen.append(("wedged", now))
            break
        if watch.due(now, DEADLINE):
            watch.sent(now)
            seen.append(("send", now))
    return seen


def every(step: float, until: float, counter: float | None = 7.0) -> Looks:
    return [(n * step, counter) for n in range(int(until / step) + 1)]


@pytest.mark.parametrize(
    ("looks", "answers_at", "seen"),
    [
        pytest.param(every(5, 100), None, [("send", 15), ("wedged", 75)], id="no token for anybody"),
        pytest.param(every(5, 100, None), None, [("send", 15), ("wedged", 75)], id="metrics are silent as well"),
        pytest.param(
            [(n * 5.0, float(n)) for n in range(40)], None, [], id="tokens are made all the time: no probe needed"
        ),
        pytest.param(
            [(n * 5.0, n // 10) for n in range(24)],
            None,
            [("send", 15), ("send", 65), ("send", 115)],
            id="saturated: a token now and then takes the probe back",
        ),
        pytest.param(every(5, 30), 20, [("send", 15)], id="the probe is answered"),
        pytest.param([(0, 1), (15, 1), (400, 1), (401, 1)], None, [("send", 15)], id="the agent itself was starved"),
        pytest.param([], None, [], id="nothing looked at"),
    ],
)
def test_a_wedge_is_no_progress_during_a_whole_probe(
    looks: Looks, answers_at: float | None, seen: list[tuple[str, float]]
) -> None:
    assert judged(looks, answers_at) == seen


def test_what_was_before_a_rest_does_not_count() -> None:
    watch = WedgeWatch()
    for now, counter in every(5, 70):
        watch.look(counter, now)
        if watch.due(now, DEADLINE):
            watch.sent(now)
    watch.rest()
    watch.look(7.0, 500.0)
    assert not watch.wedged(500.0, DEADLINE)
    assert not watch.due(500.0, DEADLINE)
