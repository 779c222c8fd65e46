"""What publish() with transfer Direct or Colocated sends from the trainer's process, with the agent played by the
test."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from sglang_rollout.client.live import live_job
from sglang_rollout.client.room import SenderRoom
from sglang_rollout.transfer.link import Link, connect
from sglang_rollout.transfer.live_sender import WrongForEngine
from sglang_rollout.transfer.manifest import Manifest, ManifestRefused
from sglang_rollout.transfer.session import Contents, Hello, Joined, Next, Payload, Refused, Sealed, Took, Welcome

TENSORS = {f"t{n}": torch.randn(300, 100) for n in range(4)}
BUCKET = 1 << 18


@pytest.fixture
def room() -> Iterator[SenderRoom]:
    made = SenderRoom()
    made.open("127.0.0.1", 0)
    yield made
    made.close()


def publish(room: SenderRoom, tensors: Any = TENSORS, *, colocated: bool, version: str = "7") -> Future[None]:
    job = live_job(room, version, tensors, colocated=colocated, bucket_bytes=BUCKET, host="127.0.0.1", timeout=20.0)
    return room.start(job)


async def meet(room: SenderRoom, mode: str, *groups: str, version: str = "7") -> tuple[Link, Welcome, Manifest]:
    link = await connect("127.0.0.1", room.reception.port, 5.0)
    offers = {"engine": {"device": "cpu", "transport": "Auto"}}
    await link.send(Hello("m", version, "pod-0", mode=mode, offers=offers, groups=list(groups)))
    welcome, contents = await link.receive(5.0), await link.receive(5.0)
    assert isinstance(welcome, Welcome)
    assert isinstance(contents, Contents)
    return link, welcome, Manifest.from_json(contents.manifest.encode())


def cut(manifest: Manifest, number: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        tensor.name: flat[offset : offset + tensor.size].view(torch.float32).view(tensor.shape)
        for tensor, offset in manifest.buckets[number].placed()
    }


async def test_buckets_are_handed_over_by_value(room: SenderRoom) -> None:
    pytest.importorskip("sglang.srt.weight_sync.tensor_bucket")
    job = publish(room, colocated=True)
    link, _, manifest = await meet(room, "colocated")
    found: dict[str, torch.Tensor] = {}
    for number in range(len(manifest.buckets)):
        await link.send(Next(number))
        said, blob = await link.receive_blob(5.0)
        assert said == Payload(number, {"sizes": str(len(blob))})
        found |= cut(manifest, number, pickle.loads(blob)["flattened_tensor"])
        await link.send(Took(number))
    await link.send(Sealed(manifest.root))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    job.cancel()
    await link.close()


async def test_buckets_are_broadcast_into_a_group_that_is_used_again(room: SenderRoom) -> None:
    held: Any = None
    kept: tuple[str, ...] = ()
    for version in ("7", "8"):
        job = publish(room, colocated=False, version=version)
        link, welcome, manifest = await meet(room, "direct", *kept, version=version)
        if held is None:
            await link.send(Joined(welcome.group))
            held = await asyncio.to_thread(as_an_engine_joins, welcome)
            assert await link.receive(5.0) == Joined(welcome.group)
        else:
            assert (welcome.group,) == kept
        kept = (welcome.group,)
        for number, bucket in enumerate(manifest.buckets):
            await link.send(Next(number))
            assert await link.receive(5.0) == Payload(number)
            flat = torch.empty(bucket.size, dtype=torch.uint8)
            options = BroadcastOptions()
            options.rootRank = 0
            await asyncio.to_thread(held.broadcast([flat], options).wait)
            assert await link.receive(5.0) == Took(number)
            for name, tensor in cut(manifest, number, flat).items():
                assert torch.equal(tensor, TENSORS[name])
        await link.send(Sealed(manifest.root))
        await asyncio.sleep(0.2)
        job.cancel()
        await link.close()


def as_an_engine_joins(welcome: Welcome) -> Any:
    """The keys are those that torch.distributed makes for SGLang."""
    limit = timedelta(seconds=10)
    store: Any = TCPStore("127.0.0.1", int(welcome.details["port"]), None, False, limit)
    for prefix in (welcome.group, f"{welcome.group}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, welcome.rank, welcome.world, limit)


async def test_the_publish_ends_with_the_agent_s_refusal(room: SenderRoom) -> None:
    job = publish(room, colocated=False)
    link, _, _ = await meet(room, "direct")
    await link.send(Refused("wrong tensors in what is sent: t1 is", lasting=True))
    with pytest.raises(WrongForEngine, match="t1 is"):
        await asyncio.wait_for(asyncio.wrap_future(job), 5)
    await link.close()


def test_bad_tensors_are_refused_before_anybody_is_asked(room: SenderRoom) -> None:
    with pytest.raises(ManifestRefused, match="meta"):
        publish(room, {"a": torch.empty(2, device="meta")}, colocated=False)
