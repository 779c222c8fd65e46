"""The local copy follows the cluster, also when the watch loses its place while objects vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_rollout.controller.informer import Informer, Store
from sglang_rollout.controller.kinds import CONFIG_MAP, Object
from sglang_rollout.controller.kube_errors import KubeError, Unreachable
from sglang_rollout.controller.projections import fleet_of
from tests.controller.fake_kube import FakeKube, eventually


def config_map(name: str, value: str = "1", fleet: str | None = "f", namespace: str = "ns") -> Object:
    labels = {"rollout.sglang.io/fleet": fleet} if fleet else {}
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "data": {"value": value}}


@dataclass
class Bench:
    kube: FakeKube
    store: Store[str]
    informer: Informer[str]
    changes: list[tuple[str, str]]

    def values(self) -> dict[str, str]:
        return {key[1]: entry.value for key, entry in self.store.group(("ns", "f")).items()}


async def running(kube: FakeKube, namespace: str | None = None) -> AsyncIterator[Bench]:
    store: Store[str] = Store()
    changes: list[tuple[str, str]] = []

    def project(value: Any) -> str | None:
        text = str(value["data"]["value"])
        return None if text == "ignore" else text

    informer = Informer(
        kube, CONFIG_MAP, namespace, store, project=project, group_of=fleet_of, on_change=changes.append
    )
    task = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 5)
    yield Bench(kube, store, informer, changes)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    kube = FakeKube()
    kube.put(CONFIG_MAP, config_map("a"))
    kube.put(CONFIG_MAP, config_map("b"))
    async for made in running(kube):
        yield made


async def test_it_follows_changes_and_tells_whose_they_are(bench: Bench) -> None:
    assert bench.values() == {"a": "1", "b": "1"}
    bench.changes.clear()
    bench.kube.put(CONFIG_MAP, config_map("a", "2"))
    await eventually(lambda: bench.values()["a"] == "2")
    assert bench.changes == [("ns", "f")]
    bench.kube.remove(CONFIG_MAP, "ns", "b")
    await eventually(lambda: "b" not in bench.values())
    assert bench.changes == [("ns", "f")] * 2


async def test_a_change_of_no_interest_tells_nobody(bench: Bench) -> None:
    bench.changes.clear()
    value = config_map("a")
    value["metadata"]["annotations"] = {"other": "thing"}
    bench.kube.put(CONFIG_MAP, value)
    bench.kube.put(CONFIG_MAP, config_map("b", "2"))
    await eventually(lambda: bench.values()["b"] == "2")
    assert bench.changes == [("ns", "f")]


async def test_what_vanished_while_the_watch_was_lost_is_told(bench: Bench) -> None:
    bench.changes.clear()
    bench.kube.remove(CONFIG_MAP, "ns", "a", silently=True)
    bench.kube.compact()
    await eventually(lambda: bench.values() == {"b": "1"})
    assert bench.changes == [("ns", "f")]
    bench.kube.put(CONFIG_MAP, config_map("c"))
    await eventually(lambda: bench.values() == {"b": "1", "c": "1"})


async def test_an_object_that_leaves_its_fleet_is_gone_from_it(bench: Bench) -> None:
    bench.kube.put(CONFIG_MAP, config_map("a", fleet=None))
    await eventually(lambda: "a" not in bench.values())
    bench.kube.put(CONFIG_MAP, config_map("b", fleet="other"))
    await eventually(lambda: bench.store.group(("ns", "other")))
    assert bench.values() == {}


async def test_a_recreated_object_is_a_change_even_if_it_looks_the_same(bench: Bench) -> None:
    bench.changes.clear()
    bench.kube.remove(CONFIG_MAP, "ns", "a", silently=True)
    bench.kube.put(CONFIG_MAP, config_map("a"))
    await eventually(lambda: bench.changes)
    assert bench.values() == {"a": "1", "b": "1"}


async def test_a_failing_server_is_asked_again(bench: Bench) -> None:
    down = True

    def fail(verb: str, *_: str) -> KubeError | None:
        return Unreachable("down") if down and verb in ("list", "watch") else None

    bench.kube.fail = fail
    bench.kube.compact()
    await asyncio.sleep(0.3)
    bench.kube.put(CONFIG_MAP, config_map("a", "3"))
    down = False
    await eventually(lambda: bench.values()["a"] == "3")


async def test_one_namespace_does_not_clear_another() -> None:
    kube = FakeKube()
    kube.put(CONFIG_MAP, config_map("a"))
    kube.put(CONFIG_MAP, config_map("b", namespace="elsewhere"))
    async for bench in running(kube, "ns"):
        assert bench.values() == {"a": "1"}
        assert not bench.store.group(("elsewhere", "f"))
