"""Links to pods: what is wanted arrives and arrives again after a restart, reports come at once, nobody waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from sglang_rollout.controller.lease import LeaderLease
from sglang_rollout.controller.links import LinkContext, LinkPool
from sglang_rollout.controller.pod_calls import Dialect, Target
from sglang_rollout.controller.tokens import FleetTokens
from sglang_rollout.protocol.desired import AgentDesired, Execution, ExecutionState
from sglang_rollout.protocol.report import AgentReport
from sglang_rollout.protocol.weights import WeightVersion
from tests.controller.fake_kube import FakeKube, eventually
from tests.controller.fake_pod import FakePod, refuse_token

FLEET = ("ns", "fleet")
RUNNING = AgentDesired(0, 1, WeightVersion("1", "/m"), Execution())
PAUSED = replace(RUNNING, generation=2, execution=Execution(ExecutionState.PAUSED))


class FakeLease(LeaderLease):
    def __init__(self) -> None:
        self.term = 3
        self.identity = "me"
        self.holds = True
        self.raised: list[int] = []

    @property
    def leading(self) -> bool:
        return self.holds

    def need_term_above(self, term: int) -> None:
        self.raised.append(term)
        self.term = max(self.term, term + 1)


@dataclass
class Bench:
    """A pool of links whose port is that of the pod in the target's name: all pods are on this machine."""

    pool: LinkPool[AgentDesired, AgentReport]
    lease: FakeLease
    kube: FakeKube
    calls: list[tuple[str, str]]
    changes: list[tuple[str, str]]
    pods: list[FakePod] = field(default_factory=list)

    async def pod(self, uid: str) -> FakePod:
        """All listen at one port, each at its own loopback address."""
        port = self.pods[0].port if self.pods else 0
        started = await FakePod(uid).start(f"127.0.0.{len(self.pods) + 1}", port)
        self.pods.append(started)
        if port == 0:
            self.pool._dialect = replace(self.pool._dialect, port=started.port)
        return started

    def link(self, *pods: FakePod) -> None:
        self.pool.sync(
            FLEET,
            {pod.uid: Target(pod.uid, pod.uid, f"127.0.0.{self.pods.index(pod) + 1}", "audience") for pod in pods},
        )

    def report(self, pod: FakePod) -> AgentReport | None:
        return self.pool.of(FLEET)[pod.uid].report


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    kube, lease = FakeKube(), FakeLease()
    calls: list[tuple[str, str]] = []
    changes: list[tuple[str, str]] = []
    context = LinkContext(
        FleetTokens(kube, "ops", "operator"),
        lease,
        lambda operation, code, _: calls.append((operation, code)),
        silent_seconds=0.3,
        poll_seconds=2.0,
    )
    dialect = Dialect("agent", 1, AgentReport, lambda report: report.agent_start)
    pool: LinkPool[AgentDesired, AgentReport] = LinkPool(dialect, context, changes.append)
    made = Bench(pool, lease, kube, calls, changes)
    yield made
    await pool.close()
    for pod in made.pods:
        await pod.stop()


async def test_what_is_wanted_arrives_once_with_the_term_of_the_lease(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    for _ in range(3):
        bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: pod.heard)
    bench.pool.want(FLEET, {"a": PAUSED})
    await eventually(lambda: len(pod.heard) == 2)
    assert pod.heard == [replace(RUNNING, lease_term=3), replace(PAUSED, lease_term=3)]
    assert 0 < pod.serials[0] < pod.serials[1], "a call that comes late can be told from its successor"


async def test_a_change_of_the_report_comes_at_once(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    await eventually(lambda: bench.report(pod))
    bench.changes.clear()
    pod.report(message="busy")
    await eventually(lambda: bench.changes == [FLEET])
    report = bench.report(pod)
    assert report is not None
    assert report.message == "busy"


async def test_a_restarted_agent_is_told_again(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: len(pod.heard) == 1)
    pod.report(agent_start="start-2")
    await eventually(lambda: len(pod.heard) == 2)
    assert pod.heard[1] == pod.heard[0]


async def test_an_order_that_was_heard_without_an_answer_is_replaced_by_that_of_before(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: len(pod.heard) == 1)
    pod.loses_answers = 1
    bench.pool.want(FLEET, {"a": PAUSED})
    await eventually(lambda: PAUSED.generation in [heard.generation for heard in pod.heard])
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: pod.heard[-1] == pod.heard[0])


async def test_a_report_is_not_of_an_order_that_is_under_way(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    link = bench.pool.of(FLEET)["a"]
    await eventually(lambda: link.report)
    assert link.untold, "it may have been told something by somebody before"
    bench.pool.want(FLEET, {"a": RUNNING})
    assert link.untold
    await eventually(lambda: not link.untold)
    pod.delay = 0.2
    bench.changes.clear()
    bench.pool.want(FLEET, {"a": PAUSED})
    await eventually(lambda: link._sent is None)
    bench.pool.want(FLEET, {"a": RUNNING})
    assert link.untold, "PAUSED may arrive, though its report is of RUNNING as is wanted"
    await eventually(lambda: not link.untold)
    assert [desired.generation for desired in pod.heard] == [1, 2, 1]
    assert bench.changes, "the plan is made again"


async def test_a_slow_agent_does_not_delay_the_others(bench: Bench) -> None:
    slow, quick = await bench.pod("slow"), await bench.pod("quick")
    slow.delay = 30.0
    bench.link(slow, quick)
    bench.pool.want(FLEET, {"slow": RUNNING, "quick": RUNNING})
    await eventually(lambda: quick.heard, 2.0)
    assert not slow.heard


async def test_a_report_is_believed_for_a_while_after_the_pod_fell_silent(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.link(pod)
    await eventually(lambda: bench.report(pod))
    link = bench.pool.of(FLEET)["a"]
    await pod.stop()
    await eventually(lambda: link._failing_since is not None)
    assert link.report is not None
    assert not link.silent
    bench.changes.clear()
    await eventually(lambda: link.silent)
    await eventually(lambda: bench.changes)
    assert link.report is None
    assert link.silent.startswith("the agent of a does not answer")
    await pod.start("127.0.0.1", pod.port)
    await eventually(lambda: link.report)
    assert not link.silent


async def test_another_pod_at_the_address_is_not_believed(bench: Bench) -> None:
    pod = await bench.pod("b")
    bench.pool.sync(FLEET, {"a": Target("a", "pod-a", "127.0.0.1", "audience")})
    link = bench.pool.of(FLEET)["a"]
    await eventually(lambda: link.silent)
    assert link.silent == "another pod (UID b) answers at the address of pod-a"
    assert link.report is None
    assert pod.tokens


async def test_a_refused_token_is_replaced_once(bench: Bench) -> None:
    pod = await bench.pod("a")
    pod.check_token = refuse_token("token-1")
    bench.link(pod)
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: pod.heard)
    assert set(pod.tokens) == {"token-1", "token-2"}
    assert bench.kube.tokens == 2


async def test_a_pod_that_obeyed_a_higher_term_makes_the_lease_go_above_it(bench: Bench) -> None:
    pod = await bench.pod("a")
    pod.term = 7
    pod.report(lease_term=7)
    bench.link(pod)
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: pod.heard)
    assert pod.heard[0].lease_term == 8


async def test_who_does_not_lead_orders_nothing(bench: Bench) -> None:
    pod = await bench.pod("a")
    bench.lease.holds = False
    bench.link(pod)
    bench.pool.want(FLEET, {"a": RUNNING})
    await eventually(lambda: bench.report(pod))
    assert not pod.heard
    assert ("desired", "200") not in bench.calls


async def test_the_sentence_of_a_refusal_is_told(bench: Bench) -> None:
    pod = await bench.pod("a")
    pod.refuse = "not today"
    bench.link(pod)
    link = bench.pool.of(FLEET)["a"]
    await eventually(lambda: link.silent)
    assert link.silent == "the agent of a answers 400: not today"


async def test_links_end_with_their_pods(bench: Bench) -> None:
    one, two = await bench.pod("a"), await bench.pod("b")
    bench.link(one, two)
    await eventually(lambda: bench.pool.settled(FLEET))
    link = bench.pool.of(FLEET)["a"]
    bench.link(two)
    await eventually(lambda: not link._tasks)
    assert set(bench.pool.of(FLEET)) == {"b"}
