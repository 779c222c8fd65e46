"""The sidecar against a router with smg's habits: repair, restarts, what it reports, and whom it obeys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_rollout.protocol.pod import PATH_DESIRED, PATH_LIVE, PATH_READY, PATH_REPORT
from sglang_rollout.protocol.routing import RouterDesired, RouterReport, Worker
from sglang_rollout.protocol.wire import dumps, loads
from sglang_rollout.router.engine_probe import EngineProbe
from sglang_rollout.router.keeper import MembershipKeeper
from sglang_rollout.router.settings import SidecarSettings
from sglang_rollout.router.sidecar import Sidecar, application, control_key
from sglang_rollout.router.workers_api import WorkersApi
from tests.router.fake_smg import CONTROL_KEY, FakeSmg
from tests.serving.cluster_keys import ClusterKey, write_fleet_file

KEY = ClusterKey("cluster")
FLEET = "team-a/fleet"
E0 = Worker("http://10.0.0.1:30000", "key-0", "fleet-e0", 1, "1")
E1 = Worker("http://10.0.0.2:30000", "key-1", "fleet-e1", 1, "1")


@dataclass
class Rig:
    """A sidecar that runs, the router beside it, and an operator's client. `refused`: engine -> why it is not added."""

    smg: FakeSmg
    gateway: TestServer
    sidecar: Sidecar
    client: TestClient[Any, Any]
    refused: dict[str, str]

    async def call(
        self, method: str, path: str, body: bytes | None = None, token: str | None = None, **query: str
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token or KEY.token()}"}
        async with self.client.request(method, path, data=body, headers=headers, params=query) as response:
            return response.status, await response.text()

    async def want(self, *workers: Worker, name: str = "set", term: int = 1) -> RouterReport:
        status, text = await self.call("PUT", PATH_DESIRED, dumps(RouterDesired(term, name, list(workers))))
        assert status == 200, text
        return loads(RouterReport, text)

    async def until(self, reached: Callable[[RouterReport], bool]) -> RouterReport:
        async with asyncio.timeout(10):
            report = self.sidecar.board.report
            while not reached(report):
                report = await self.sidecar.board.after(report.revision, 10)
            return report

    async def in_step(self, name: str = "set") -> RouterReport:
        return await self.until(lambda report: report.desired_id == name and report.in_step)

    async def ready(self) -> bool:
        return (await self.client.get(PATH_READY)).status == 200


@asynccontextmanager
async def rig(folder: Path, smg: FakeSmg | None = None) -> AsyncIterator[Rig]:
    smg = smg or FakeSmg()
    refused: dict[str, str] = {}

    async def objection(worker: Worker) -> str:
        return refused.get(worker.engine, "")

    fleet_file = folder / "fleet.json"
    write_fleet_file(fleet_file, [KEY])
    gateway = TestServer(smg.application())
    await gateway.start_server()
    settings = SidecarSettings("pod-1", folder, fleet_file)
    async with aiohttp.ClientSession() as session:
        api = WorkersApi(session, str(gateway.make_url("")), lambda: CONTROL_KEY, FLEET)
        keeper = MembershipKeeper(api, FLEET, exclusive=True, pod_uid="pod-1", objection=objection)
        sidecar = Sidecar(settings, keeper)
        loop = asyncio.create_task(sidecar.run())
        try:
            async with TestClient(TestServer(application(sidecar, settings))) as client:
                yield Rig(smg, gateway, sidecar, client, refused)
            assert smg.faults == []
        finally:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
            await gateway.close()


async def test_the_router_gets_exactly_the_desired_workers(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        running.smg.put_worker("http://10.9.9.9:30000", "foreign")
        first = await running.want(E0, E1)
        assert (first.desired_id, first.in_step) == ("set", False)
        report = await running.in_step()
        assert running.smg.routable() == {E0.url: "key-0", E1.url: "key-1"}
        assert [(w.engine, w.incarnation, w.healthy) for w in report.registered] == [
            ("fleet-e0", 1, True),
            ("fleet-e1", 1, True),
        ]
        assert (report.pod_uid, report.lease_term, report.message) == ("pod-1", 1, "")

        await running.want(E1, name="less")
        await running.in_step("less")
        assert running.smg.routable() == {E1.url: "key-1"}


async def test_before_an_operator_has_spoken_the_router_is_left_alone(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        running.smg.put_worker(E0.url, "key-0")
        report = await running.until(lambda report: "no operator has said yet" in report.message)
        assert (report.router_up, report.in_step) == (True, False)
        assert not await running.ready()
        assert running.smg.calls == []


async def test_a_new_key_is_put_in_place(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        await running.want(E0)
        await running.in_step()
        running.smg.calls.clear()
        await running.want(replace(E0, api_key="next", incarnation=2), name="next")
        await running.in_step("next")
        assert running.smg.routable() == {E0.url: "next"}
        assert {method for method, _ in running.smg.calls} == {"PATCH"}


@pytest.mark.parametrize("old", [False, True], ids=["smg", "sglang-router"])
async def test_a_new_version_alone_updates_labels_and_stays_in_step(tmp_path: Path, old: bool) -> None:
    async with rig(tmp_path, FakeSmg(sglang_router=old)) as running:
        await running.want(E0)
        await running.in_step()
        running.smg.calls.clear()
        moved = replace(E0, weight_version="2", incarnation=3)
        await running.want(moved, name="moved")
        await running.until(lambda report: report.in_step and [w.incarnation for w in report.registered] == [3])
        assert {method for method, _ in running.smg.calls} == ({"PATCH", "PUT"} if old else {"PATCH"})


async def test_an_engine_that_comes_back_while_it_drains_is_added_afterwards(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSmg(drain_seconds=0.5)) as running:
        await running.want(E0)
        await running.in_step()
        await running.want(name="none")
        await running.in_step("none")
        await running.want(E0, name="back")
        await running.until(lambda report: "fleet-e0 must drain" in report.message)
        await running.in_step("back")
        assert running.smg.routable() == {E0.url: "key-0"}


async def test_a_restarted_router_gets_its_workers_back(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        await running.want(E0, E1)
        await running.in_step()
        running.smg.restart()
        await running.until(lambda report: not report.in_step)
        await running.in_step()
        assert running.smg.routable() == {E0.url: "key-0", E1.url: "key-1"}


async def test_a_router_that_is_not_there_is_told_and_takes_readiness_away(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        await running.want(E0)
        await running.in_step()
        assert await running.ready()
        await running.gateway.close()
        report = await running.until(lambda report: not report.router_up)
        assert not report.in_step
        assert report.registered == []
        assert "the router does not answer" in report.message
        assert not await running.ready()


@pytest.mark.parametrize("fault", ["slow", "refusing"])
async def test_a_router_that_does_not_say_is_taken_to_have_what_it_had(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_rollout.router.workers_api.LIST_SECONDS", 0.2)
    async with rig(tmp_path) as running:
        await running.want(E0)
        await running.in_step()
        setattr(running.smg, fault, True)
        report = await running.until(lambda report: "cannot be used" in report.message or "no answer" in report.message)
        assert (report.router_up, report.in_step) == (True, False)
        assert await running.ready(), "it may go on serving"
        answer = await running.want(name="none")
        assert (answer.router_up, answer.in_step) == (True, False)
        assert [worker.engine for worker in answer.registered] == ["fleet-e0"]
        setattr(running.smg, fault, False)
        assert (await running.in_step("none")).registered == []


async def test_a_sidecar_that_has_not_looked_yet_takes_its_router_to_have_the_workers(tmp_path: Path) -> None:
    smg = FakeSmg()
    async with rig(tmp_path, smg) as running:
        await running.want(E0)
        await running.in_step()
    smg.slow = True
    async with rig(tmp_path, smg) as running:
        report = await running.want(name="none")
        assert (report.router_up, report.in_step) == (True, False)
        assert [worker.engine for worker in report.registered] == ["fleet-e0"]


async def test_an_addition_that_is_under_way_is_waited_for_before_it_can_be_taken_back(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSmg(add_seconds=0.4)) as running:
        await running.want(E0, name="one")
        await running.until(lambda report: "workers are being changed" in report.message)
        await running.want(name="none")
        report = await running.until(lambda report: "cannot be taken back yet" in report.message)
        assert not report.in_step
        await running.in_step("none")
        assert running.smg.routable() == {}
        assert {entry.status for entry in running.smg.entries.values()} <= {"draining"}


async def test_readiness_outlives_changes_of_the_set(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        await running.want(E0)
        await running.in_step()
        running.refused["fleet-e1"] = "not now"
        await running.want(E0, E1, name="more")
        await running.until(lambda report: report.message == "not now")
        assert await running.ready()


async def test_a_restarted_sidecar_goes_on_without_the_operator(tmp_path: Path) -> None:
    smg = FakeSmg()
    async with rig(tmp_path, smg) as running:
        await running.want(E0, term=7)
        await running.in_step()
    smg.restart()
    async with rig(tmp_path, smg) as running:
        report = await running.in_step()
        assert (report.lease_term, report.desired_id) == (7, "set")
        assert smg.routable() == {E0.url: "key-0"}
        status, text = await running.call("PUT", PATH_DESIRED, dumps(RouterDesired(6, "old", [])))
        assert status == 409
        assert "term 6 is over" in text


async def test_a_restarted_sidecar_changes_nothing_that_is_right(tmp_path: Path) -> None:
    smg = FakeSmg()
    async with rig(tmp_path, smg) as running:
        await running.want(E0)
        await running.in_step()
    smg.calls.clear()
    async with rig(tmp_path, smg) as running:
        await running.in_step()
    assert smg.calls == []


async def test_an_engine_with_an_objection_keeps_nobody_else_out(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        running.refused["fleet-e1"] = "fleet-e1 refuses its key"
        await running.want(E0, E1)
        report = await running.until(lambda report: len(report.registered) == 1)
        assert (report.in_step, report.message) == (False, "fleet-e1 refuses its key")
        assert running.smg.routable() == {E0.url: "key-0"}
        running.refused.clear()
        await running.in_step()


async def test_a_new_leader_with_the_same_set_disturbs_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        await running.want(E0, term=1)
        await running.in_step()
        report = await running.want(E0, term=2)
        assert (report.lease_term, report.in_step) == (2, True)


async def test_a_look_at_the_router_that_began_before_a_put_says_nothing_of_it(tmp_path: Path) -> None:
    """The router is asked slowly; the new set arrives meanwhile and must not be reported as reached."""

    class SlowKeeper(MembershipKeeper):
        async def step(self, desired: RouterDesired | None) -> RouterReport:
            looking.set()
            await answer.wait()
            base = self.unseen_report(desired, "")
            return replace(base, in_step=True, router_up=True)

    looking, answer = asyncio.Event(), asyncio.Event()
    settings = SidecarSettings("pod-1", tmp_path, tmp_path / "fleet.json")
    async with aiohttp.ClientSession() as session:
        keeper = SlowKeeper(WorkersApi(session, "http://127.0.0.1:9", str, FLEET), FLEET, exclusive=True)
        sidecar = Sidecar(settings, keeper)
        sidecar.want(RouterDesired(1, "old", []))
        look = asyncio.create_task(sidecar._look())
        await looking.wait()
        sidecar.want(RouterDesired(1, "new", [E0]))
        answer.set()
        assert await look is False
        assert (sidecar.board.report.desired_id, sidecar.board.report.in_step) == ("new", False)


@pytest.mark.parametrize(
    ("token", "status"),
    [
        ("rubbish", 401),
        (KEY.token(aud=["sglang-rollout:other"]), 401),
        (KEY.token(exp=1_600_000_000), 401),
        (KEY.token(sub="system:serviceaccount:team-a:default"), 403),
    ],
    ids=["no token", "audience", "expired", "subject"],
)
@pytest.mark.parametrize(("method", "path"), [("PUT", PATH_DESIRED), ("GET", PATH_REPORT), ("GET", "/")])
async def test_only_the_fleets_callers_are_obeyed(
    tmp_path: Path, token: str, status: int, method: str, path: str
) -> None:
    async with rig(tmp_path) as running:
        body = dumps(RouterDesired(1, "set", [E0]))
        assert (await running.call(method, path, body, token))[0] == status
        assert running.sidecar.board.report.desired_id == ""


@pytest.mark.parametrize(
    ("body", "query", "status", "says"),
    [
        (b"{", {}, 400, "not JSON"),
        (b'{"leaseTerm": 1}', {}, 400, "not a RouterDesired"),
        (dumps(RouterDesired(1, "set", [])), {"pod": "pod-0"}, 421, "this is pod pod-1, not pod-0"),
        (dumps(RouterDesired(1, "set", [])), {"pod": "pod-1"}, 200, "desiredId"),
    ],
)
async def test_what_is_accepted(tmp_path: Path, body: bytes, query: dict[str, str], status: int, says: str) -> None:
    async with rig(tmp_path) as running:
        got, text = await running.call("PUT", PATH_DESIRED, body, **query)
        assert got == status
        assert says in text


async def test_a_change_answers_a_waiting_operator(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        report = await running.want(name="none")
        report = await running.in_step("none")
        waiting = asyncio.create_task(running.call("GET", PATH_REPORT, after=str(report.revision), wait="30"))
        await asyncio.sleep(0)
        await running.want(E0)
        async with asyncio.timeout(5):
            status, text = await waiting
        assert status == 200
        assert loads(RouterReport, text).desired_id == "set"


async def test_probes_are_open(tmp_path: Path) -> None:
    async with rig(tmp_path) as running:
        assert (await running.client.get(PATH_LIVE)).status == 200
        assert (await running.client.get(PATH_READY)).status == 503


def test_the_control_key_is_made_once_and_private(tmp_path: Path) -> None:
    key = control_key(tmp_path)
    assert len(key) >= 40
    assert control_key(tmp_path) == key
    assert (tmp_path / "router-control.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("status", "says"), [(200, ""), (401, "refuses its key"), (503, "answers 503"), (None, "cannot be reached")]
)
async def test_the_probe_of_an_engine(status: int | None, says: str) -> None:
    async def model_info(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key-0"
        return web.Response(status=status or 200)

    app = web.Application()
    app.router.add_get("/model_info", model_info)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        engine = replace(E0, url=str(server.make_url("")).rstrip("/"))
        if status is None:
            await server.close()
        objection = await EngineProbe(session).objection(engine)
    assert (says in objection) if says else objection == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (web.json_response({"workers": [{"id": "x"}]}), "not a list of workers"),
        (web.Response(text="<html>"), "not JSON"),
        (web.Response(status=401, text="Missing"), "401 Missing"),
    ],
    ids=["other form", "no JSON", "refused"],
)
async def test_an_odd_router_is_told_and_not_in_step(answer: web.Response, says: str) -> None:
    async def workers(request: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_get("/workers", workers)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        api = WorkersApi(session, str(server.make_url("")), str, FLEET)
        report = await MembershipKeeper(api, FLEET, exclusive=True).step(RouterDesired(1, "set", []))
    assert (report.router_up, report.in_step) == (True, False)
    assert says in report.message
