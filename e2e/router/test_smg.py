"""The router's pod with the real smg: who gets requests, with which key, and what becomes of requests that wait."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from e2e.router.engines import SmallEngine
from e2e.router.pods import RouterPod, engines, router_pod, until, worker
from sglang_rollout.api.owned_flags import ROUTER_FLAGS
from sglang_rollout.router.gateway import OWNED
from sglang_rollout.router.settings import CONTROL_KEY
from tests.free_ports import free_port

pytestmark = [pytest.mark.router, pytest.mark.timeout(180)]


async def served_by(pod: RouterPod, count: int = 20) -> Counter[object]:
    """Which engines' ports answered, or the status that came instead."""
    answers = await asyncio.gather(*(pod.generate() for _ in range(count)))
    return Counter(json.loads(text)["meta_info"]["port"] if status == 200 else status for status, text in answers)


async def test_exactly_the_desired_engines_get_requests(smg: Path, tmp_path: Path) -> None:
    async with engines(3) as (first, second, third), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(first, 0), worker(second, 1), name="two")
        report = await pod.in_step("two")
        assert [(w.engine, w.incarnation, w.healthy) for w in report.registered] == [
            (engine, 1, True) for _, engine in sorted([(first.url, "fleet-e0"), (second.url, "fleet-e1")])
        ]
        assert set(await served_by(pod)) == {first.port, second.port}

        await pod.want(worker(second, 1), worker(third, 2), name="other two")
        await pod.in_step("other two")
        assert set(await served_by(pod)) == {second.port, third.port}

        await pod.want(name="none")
        await pod.in_step("none")
        assert set(await served_by(pod)) == {503}
        assert first.refused + second.refused + third.refused == 0


async def test_in_step_means_that_a_removed_engine_gets_nothing_more(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (first, second), router_pod(smg, tmp_path) as pod:
        for round_ in range(3):
            await pod.want(worker(first, 0), worker(second, 1), name=f"both {round_}")
            await pod.in_step(f"both {round_}")
            asking = asyncio.create_task(served_by(pod, 300))
            await pod.want(worker(second, 1), name=f"one {round_}")
            await pod.in_step(f"one {round_}")
            arrived = first.arrived
            await asking
            assert set(await served_by(pod)) == {second.port}
            assert first.arrived == arrived


async def test_a_new_key_takes_the_old_ones_place_under_a_waiting_request(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine), name="old")
        await pod.in_step("old")
        engine.pause()
        waiting = asyncio.create_task(pod.generate())
        await until(lambda: engine.arrived > 0)
        engine.key = "key-of-the-next-start"
        await pod.want(worker(engine, incarnation=2), name="new")
        report = await pod.in_step("new")
        assert [w.incarnation for w in report.registered] == [2]
        engine.resume()
        assert (await waiting)[0] == 200
        assert await served_by(pod) == {engine.port: 20}
        assert engine.refused == 0


async def test_other_labels_alone_change_nothing_else(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine), name="1")
        await pod.in_step("1")
        asking = asyncio.create_task(served_by(pod, 500))
        engine.version = "2"
        await pod.want(replace(worker(engine), incarnation=7, weight_version="2"), name="2")
        await pod.until(lambda report: report.in_step and [w.incarnation for w in report.registered] == [7])
        assert await asking == {engine.port: 500}


async def test_an_engine_that_refuses_the_key_is_not_registered(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (first, second), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(first, 0), worker(second, 1, key="of an earlier start"), name="x")
        report = await pod.until(lambda report: "refuses its key" in report.message)
        assert "fleet-e1" in report.message
        assert not report.in_step
        assert set(await served_by(pod)) == {first.port}
        await pod.want(worker(first, 0), worker(second, 1), name="y")
        await pod.in_step("y")
        assert set(await served_by(pod)) == {first.port, second.port}


async def test_an_engine_that_cannot_be_reached_is_registered_once_it_can(smg: Path, tmp_path: Path) -> None:
    absent = SmallEngine(port=free_port())
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine, 0), worker(absent, 1), name="x")
        report = await pod.until(lambda report: "cannot be reached" in report.message)
        assert "fleet-e1" in report.message
        assert set(await served_by(pod)) == {engine.port}
        await absent.start()
        try:
            await pod.in_step("x")
            assert set(await served_by(pod)) == {engine.port, absent.port}
        finally:
            await absent.stop()


async def test_a_restarted_router_gets_its_workers_back_without_the_operator(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (first, second), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(first, 0), worker(second, 1))
        await pod.in_step()
        assert await pod.status_of("/readyz", pod.sidecar_port) == 200
        await pod.router.stop(signal.SIGKILL)
        await pod.until(lambda report: not report.router_up and not report.in_step)
        assert await pod.status_of("/readyz", pod.sidecar_port) == 503
        await pod.router.start()
        await pod.in_step()
        assert await pod.status_of("/readyz", pod.sidecar_port) == 200
        assert set(await served_by(pod)) == {first.port, second.port}


async def test_a_restarted_sidecar_knows_what_the_router_has(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (first, second), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(first, 0), worker(second, 1))
        await pod.in_step()
        asking = asyncio.create_task(served_by(pod, 300))
        await pod.sidecar.stop(signal.SIGKILL)
        await pod.sidecar.start()
        report = await pod.in_step()
        assert (report.lease_term, report.desired_id) == (1, "set")
        answers = await asking
        assert answers[first.port] + answers[second.port] == 300
        assert "adding" not in pod.sidecar.log.read_text().split("serving on port")[2]


async def test_a_worker_that_somebody_else_added_is_removed(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (engine, foreign), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        control_key = (tmp_path / "router-control.key").read_text()
        url = f"http://127.0.0.1:{pod.gateway_port}/workers"
        body = {"url": foreign.url, "api_key": foreign.key, "runtime_type": "sglang", "connection_mode": "http"}
        async with pod.session.post(url, json=body, headers={"Authorization": f"Bearer {control_key}"}) as response:
            assert response.status == 202
        await until(lambda: f"removing {foreign.url}" in pod.sidecar.log.read_text())
        await pod.in_step()
        assert set(await served_by(pod)) == {engine.port}


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
async def test_requests_wait_at_paused_engines(smg: Path, tmp_path: Path, policy: str) -> None:
    """Longer than smg needs to find an engine stalled (2 s) or wedged (3 s); each request arrives once."""
    async with engines(2) as paused, router_pod(smg, tmp_path, [f"--policy={policy}"]) as pod:
        await pod.want(*(worker(engine, index) for index, engine in enumerate(paused)))
        await pod.in_step()
        for engine in paused:
            engine.pause()
        waiting = [asyncio.create_task(pod.generate(stream=number % 2 == 0)) for number in range(24)]
        for number in range(10):
            await asyncio.sleep(1)
            waiting.append(asyncio.create_task(pod.generate(stream=number % 2 == 0)))
        assert not any(task.done() for task in waiting)
        for engine in paused:
            engine.resume()
        answers = await asyncio.gather(*waiting)
        assert [status for status, _ in answers] == [200] * len(waiting)
        assert sum(text.count("[DONE]") for _, text in answers) == 12 + 5
        assert sum(engine.arrived for engine in paused) == len(waiting)


async def test_a_dead_engines_requests_are_not_sent_twice(smg: Path, tmp_path: Path) -> None:
    async with engines(2) as (first, second), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(first, 0), worker(second, 1))
        await pod.in_step()
        first.pause()
        second.pause()
        waiting = [asyncio.create_task(pod.generate()) for _ in range(8)]
        await until(lambda: first.arrived + second.arrived == 8)
        await first.stop()
        await until(lambda: sum(task.done() for task in waiting) == first.arrived)
        second.resume()
        statuses = Counter(status for status, _ in await asyncio.gather(*waiting))
        assert statuses[200] == second.arrived
        assert first.arrived + second.arrived == 8


async def test_a_client_that_goes_away_ends_its_request_at_the_engine(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        engine.pause()
        for stream in (False, True):
            waiting = asyncio.create_task(pod.generate(stream=stream))
            await until(lambda: engine.held > 0)
            waiting.cancel()
            await until(lambda: engine.held == 0)


async def test_what_clients_send_as_authorization_never_reaches_an_engine(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        for header in ("Bearer sk-anything", "Basic dXNlcjpwYXNz", ""):
            assert (await pod.generate({"Authorization": header}))[0] == 200
        assert engine.refused == 0


async def test_the_control_plane_cannot_be_reached_from_outside(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        control_key = (tmp_path / "router-control.key").read_text()
        right = {"Authorization": f"Bearer {control_key}"}
        assert await pod.status_of("/workers", pod.gateway_port, right) == 200
        assert await pod.status_of("/workers", pod.gateway_port) == 401
        assert await pod.status_of("/workers", headers=right) == 401


async def test_only_clients_with_a_key_are_served(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path, client_keys="first-key\n\nsecond-key\n") as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        for key in ("first-key", "second-key"):
            assert (await pod.generate({"Authorization": f"Bearer {key}"}))[0] == 200
        for header in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer other"},
            {"Authorization": "first-key"},
        ):
            status, text = await pod.generate(header)
            assert (status, json.loads(text)["error"]["code"]) == (401, "invalid_api_key")
        assert await pod.status_of("/liveness") == 200
        assert engine.refused == 0

        engine.pause()
        waiting = asyncio.create_task(pod.generate({"Authorization": "Bearer first-key"}))
        await until(lambda: engine.held > 0)
        (tmp_path / "client.key").write_text("third-key")
        await until(lambda: "clients' keys have changed" in pod.router.log.read_text())
        await asyncio.sleep(1)
        assert await pod.status_of("/v1/models", headers={"Authorization": "Bearer third-key"}) == 200
        assert await pod.status_of("/v1/models", headers={"Authorization": "Bearer first-key"}) == 401
        engine.resume()
        assert (await waiting)[0] == 200


async def test_no_key_is_on_a_command_line_or_in_a_log(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path, client_keys="client-secret") as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        secrets = [engine.key, "client-secret", (tmp_path / "router-control.key").read_text()]
        seen = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        seen += [pod.sidecar.log.read_bytes(), pod.router.log.read_bytes()]
        assert not [secret for secret in secrets for text in seen if secret.encode() in text]
        assert sorted(path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077) == [
            *sorted(["client.key", "fleet.json", "router.log", "sidecar.log"])
        ]


async def test_a_stopped_router_lets_waiting_requests_end(smg: Path, tmp_path: Path) -> None:
    async with engines(1) as (engine,), router_pod(smg, tmp_path) as pod:
        await pod.want(worker(engine))
        await pod.in_step()
        engine.pause()
        waiting = asyncio.create_task(pod.generate())
        await until(lambda: engine.held > 0)
        stopping = asyncio.create_task(pod.router.stop(signal.SIGTERM))
        await asyncio.sleep(1)
        later = asyncio.create_task(pod.generate())  # sent before every node has forgotten this pod
        await asyncio.sleep(5)
        engine.resume()
        assert [(await waiting)[0], (await later)[0]] == [200, 200]
        assert await stopping == 0


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--enable-rl", "may not set --enable-rl"),
        ("--worker-urls=http://127.0.0.1:1", "may not set --worker-urls"),
        ("--retry-max-ret=9", "may not set --retry-max-retries"),
        ("--api-key=x", "may not set --api-key"),
        ("--policy=power_of_two", "use least_load"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
async def test_arguments_that_cannot_be_used_are_refused(smg: Path, tmp_path: Path, argument: str, says: str) -> None:
    (tmp_path / CONTROL_KEY).write_text("key")
    async with aiohttp.ClientSession() as session:
        launch = RouterPod(smg, tmp_path, session, [argument]).router
        await launch.start()
        assert await launch.wait() != 0
    assert says in launch.log.read_text()


def test_every_flag_that_the_resource_refuses_is_refused_here_too(smg: Path) -> None:
    """By smg's own parser: what each flag that admission refuses sets is among OWNED, and all of OWNED exists."""
    script = """if True:
        import argparse, json
        from smg.router_args import RouterArgs
        parser = argparse.ArgumentParser()
        RouterArgs.add_cli_args(parser, use_router_prefix=False)
        flags = {flag: action.dest for action in parser._actions for flag in action.option_strings}
        print(json.dumps([flags, list(vars(RouterArgs()))]))
    """
    done = subprocess.run([smg, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    destinations, fields = json.loads(done.stdout)
    aliases = {"prefill": "prefill_urls", "decode": "decode_urls", "encode": "encode_urls"}
    aliases |= {"tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"}
    aliases |= {"tenant_api_key": "tenant_api_keys"}
    set_by_refused = {destinations[flag] for flag in ROUTER_FLAGS.flags if flag != "--policy"}
    assert {aliases.get(name, name) for name in set_by_refused} <= set(OWNED)
    assert set(OWNED) <= set(fields)
