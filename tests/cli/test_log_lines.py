"""Lines of logs that are read again after a reconnect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.cli.log_lines import Cursor, container_names, starts_of


def stamped(nanoseconds: int, text: str) -> str:
    return f"2026-01-02T03:04:05.{nanoseconds:09d}Z {text}"


lines = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["a", "b", ""])), unique=True).map(
    lambda found: [stamped(nanoseconds, text) for nanoseconds, text in sorted(found, key=lambda line: line[0])]
)


@given(lines, st.integers(0, 20), st.integers(0, 20))
def test_a_reconnect_shows_every_line_once(log: list[str], cut: int, back: int) -> None:
    cursor = Cursor("pod", "engine")
    first, again = log[:cut], log[max(0, min(cut, len(log)) - back) :]

    taken = [line for raw in [*first, *again] if (line := cursor.take(raw)) is not None]

    assert [f"{line.time} {line.text}" for line in taken] == log


def test_a_line_without_a_time_is_shown_as_it_is() -> None:
    line = Cursor("pod", "engine").take("unable to retrieve container logs")

    assert line is not None
    assert (line.time, line.text) == ("", "unable to retrieve container logs")


def test_native_sidecars_are_containers() -> None:
    pod = {
        "spec": {"initContainers": [{"name": "inject"}, {"name": "agent"}], "containers": [{"name": "engine"}]},
        "status": {"initContainerStatuses": [{"name": "agent", "containerID": "containerd://1"}]},
    }

    assert container_names(pod) == ["inject", "agent", "engine"]
    assert starts_of(pod, "agent") == "containerd://1"
    assert starts_of(pod, "engine") == ""
