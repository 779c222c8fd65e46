"""What is wrong is told in one sentence with the pod, the container and the line that matters."""

from __future__ import annotations

import pytest

from sglang_rollout.transitions.diagnosis import pod_problem
from sglang_rollout.transitions.observed import ContainerView, PodView


def pod(*containers: ContainerView, unschedulable: str = "") -> PodView:
    return PodView("f-e0-0", "u", 0, containers=containers, unschedulable=unschedulable)


CASES = [
    (pod(ContainerView("engine", running=True)), ""),
    (pod(ContainerView("engine", waiting="ContainerCreating")), ""),
    (pod(ContainerView("inject", exit_code=0, exit_reason="Completed")), ""),
    (
        pod(unschedulable="0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        "pod f-e0-0 cannot be scheduled: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    (
        pod(ContainerView("engine", waiting="ImagePullBackOff", waiting_message='Back-off pulling image "no/such"')),
        'pod f-e0-0, container engine: ImagePullBackOff: Back-off pulling image "no/such"',
    ),
    (
        pod(
            ContainerView("agent", running=True),
            ContainerView(
                "engine",
                waiting="CrashLoopBackOff",
                exit_code=2,
                exit_message="usage: ...\nlaunch_server.py: error: unrecognized arguments: --no-such\n",
            ),
        ),
        "pod f-e0-0, container engine: exited with code 2: launch_server.py: error: unrecognized arguments: --no-such",
    ),
    (
        pod(ContainerView("engine", waiting="CrashLoopBackOff", exit_code=137, exit_reason="OOMKilled")),
        "pod f-e0-0, container engine: exited with code 137: OOMKilled",
    ),
    # An engine that was told to start again.
    (pod(ContainerView("engine", exit_code=0, exit_reason="Completed")), ""),
    (pod(ContainerView("engine", waiting="CrashLoopBackOff", exit_code=0, exit_reason="Completed")), ""),
    # It runs again: what ended before is history.
    (pod(ContainerView("engine", running=True, exit_code=137, exit_reason="Error")), ""),
]


@pytest.mark.parametrize(("view", "sentence"), CASES)
def test_the_sentence(view: PodView, sentence: str) -> None:
    assert pod_problem(view) == sentence
