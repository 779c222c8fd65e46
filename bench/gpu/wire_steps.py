"""What is measured on the wire: transfers beside decoding, commits, Direct, and a catch-up from another agent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from e2e.agent.local_pod import LocalPod
from sglang_rollout.protocol.weights import PauseMode, SourceKind, Step

from .streams import DecodeStreams
from .wire_bench import Bench

MIB = 1 << 20
SHIPPED = 0  # size of buckets: the client's own choice
SETTLE_SECONDS = 3.0  # by whose rate what takes long is judged


async def transfer(bench: Bench, transport: str, bucket_bytes: int) -> dict[str, Any]:
    """Into the stage, while the engine decodes; nothing is committed."""
    assert bench.trainer is not None
    label = bench.label()
    await bench.begin_alike()
    words = {"mode": "staged", "version": label, "of": bench.other(), "transport": transport}
    bench.trainer.order(**words, bucket_bytes=bucket_bytes or None)
    await bench.trainer.said("sending", label)
    begin = time.monotonic()
    report = await bench.make(bench.move(label, Step.PREPARE, transport=transport))
    end = time.monotonic()
    assert report.move is not None
    sent = await bench.trainer.done(label, waits=not report.move.error)
    row: dict[str, Any] = {"transport": transport, "bucket MiB": _told(bucket_bytes)}
    if report.move.error or "error" in sent:
        return row | {"error": report.move.error, "sender": sent.get("error", "")}
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    return row | {
        "used": sent["transport"],
        "sent, s": round(sent["seconds"], 4),
        "GB/s": round(sent["size"] / 1e9 / sent["seconds"], 1),
        "order to staged, s": round(end - begin, 4),
        "decode lost, ms": round(seen.lost * 1e3, 1),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
        "decode, tok/s": round(seen.rate),
    }


async def transfers(
    bench: Bench, transports: Sequence[str], sizes: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    rows = []
    for transport in transports:
        for size in sizes:
            for _ in range(repeats):
                rows.append(await transfer(bench, transport, size))
                print(json.dumps(rows[-1]), flush=True)
    return rows


async def committed(bench: Bench, transport: str, size: int, mode: PauseMode, of: str = "") -> dict[str, Any]:
    """From the order to the new version being served, wire and commit; as one move, without an operator's barriers."""
    assert bench.trainer is not None
    of = of or bench.other()
    label = bench.label()
    await bench.begin_alike()
    bench.trainer.order(mode="staged", version=label, of=of, transport=transport, bucket_bytes=size or None)
    await bench.trainer.said("sending", label)
    begin = time.monotonic()
    report = await bench.make(bench.move(label, Step.CONTINUE, transport=transport, pause_mode=mode))
    end = time.monotonic()
    assert report.move is not None
    sent = await bench.trainer.done(label, waits=not report.move.error)
    if report.move.error:
        return {"mode": str(mode), "error": report.move.error, "sender": sent.get("error", "")}
    bench.serves = of
    seen = await asyncio.to_thread(bench.streams.around, begin, end)
    assert report.engine.weight_version == label, report.engine
    return {
        "mode": str(mode),
        "used": sent.get("transport", ""),
        "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
        "order to serving, s": round(end - begin, 4),
        "sent, s": round(sent.get("seconds", 0.0), 4),
        "decode lost, ms": round(seen.lost * 1e3, 1),
        "longest token gap, ms": round(seen.gap * 1e3, 1),
    }


async def commits(bench: Bench, size: int, repeats: int) -> dict[str, Any]:
    rows = []
    for _ in range(repeats):
        for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT):
            rows.append(await committed(bench, "Auto", size, mode))
            print(json.dumps(rows[-1]), flush=True)
    medians = {
        mode: median(row["pause to continue, ms"] for row in rows if row["mode"] == mode and "error" not in row)
        for mode in {row["mode"] for row in rows if "error" not in row}
    }
    return {"rows": rows, "pause to continue, ms, medians": medians}


async def direct(bench: Bench, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Into the paused engine by SGLang's own group, through our transaction."""
    assert bench.trainer is not None
    rows = []
    for size in sizes:
        for _ in range(repeats):
            of, label = bench.other(), bench.label()
            await bench.begin_alike()
            bench.trainer.order(mode="direct", version=label, of=of, bucket_bytes=size or None)
            await bench.trainer.said("serving", label)
            begin = time.monotonic()
            wanted = bench.move(label, Step.CONTINUE, SourceKind.DIRECT, pause_mode=PauseMode.RETRACT)
            report = await bench.make(wanted)
            end = time.monotonic()
            bench.trainer.order(mode="over", version=label)
            sent = await bench.trainer.done(label)
            assert report.move is not None
            row: dict[str, Any] = {"bucket MiB": _told(size), "error": report.move.error or sent.get("error", "")}
            if not row["error"]:
                bench.serves = of
                seen = await asyncio.to_thread(bench.streams.around, begin, end)
                row |= {
                    "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
                    "order to serving, s": round(end - begin, 3),
                    "decode lost, ms": round(seen.lost * 1e3, 1),
                    "longest token gap, ms": round(seen.gap * 1e3, 1),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _told(size: int) -> float | str:
    return size / MIB if size else "shipped"


async def many(bench: Bench, transport: str, size: int, count: int) -> dict[str, Any]:
    """Transfers one after the other, whether one of them comes to a stop."""
    assert bench.trainer is not None
    before = await asyncio.to_thread(bench.streams.rate, SETTLE_SECONDS)
    begin = time.monotonic()
    seconds: list[float] = []
    used: set[str] = set()
    error = ""
    while len(seconds) < count and not error:
        label = bench.label()
        words = {"mode": "staged", "version": label, "of": bench.other(), "transport": transport}
        bench.trainer.order(**words, bucket_bytes=size or None)
        await bench.trainer.said("sending", label)
        report = await bench.make(bench.move(label, Step.PREPARE, transport=transport))
        assert report.move is not None
        sent = await bench.trainer.done(label, waits=not report.move.error)
        error = report.move.error or sent.get("error", "")
        if not error:
            seconds.append(sent["seconds"])
            used.add(sent["transport"])
    end = time.monotonic()
    decoded = await _share(bench.streams, begin, end, before)
    return {
        "transport": transport,
        "used": sorted(used),
        "bucket MiB": _told(size),
        "transfers": len(seconds),
        "error": error,
        "all, s": round(end - begin, 2),
        "on the wire, s": round(sum(seconds), 2),
        "GB/s, median": round(bench.size / 1e9 / median(seconds), 1) if seconds else 0.0,
        "decode, of base": round(decoded, 3),
        # All that is slower than before, while others travel or between them.
        "decode lost, ms each": round((1 - decoded) * (end - begin) / max(1, len(seconds)) * 1e3, 1),
    }


async def _share(streams: DecodeStreams, begin: float, end: float, before: float) -> float:
    """Of the rate before, in tokens a second."""
    stamps = await asyncio.to_thread(streams.stamps, begin, end)
    return len(stamps) / max(end - begin, 1e-9) / max(before, 1e-9)


async def catch_ups(bench: Bench, size: int, repeats: int) -> list[dict[str, Any]]:
    """The second engine gets what the first serves from the first one's agent, while both decode."""
    giver, taker = bench.pods
    rows = []
    streams = await bench.decoding(taker)
    try:
        for _ in range(repeats):
            served = await committed(bench, "Auto", size, PauseMode.IN_PLACE)  # what the stage of the giver holds then
            rows.append(await _catch_up(bench, giver, taker, streams) | {"the giver's commit before": served})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        streams.__exit__(None, None, None)
    return rows


async def _catch_up(bench: Bench, giver: LocalPod, taker: LocalPod, streams: DecodeStreams) -> dict[str, Any]:
    root = (await giver.report()).engine.weights_root
    rates = [asyncio.to_thread(one.rate, SETTLE_SECONDS) for one in (bench.streams, streams)]
    giving, taking = await asyncio.gather(*rates)
    wanted = bench.move(
        bench.label(),
        Step.CONTINUE,
        SourceKind.KEPT,
        root=root,
        senders=[],
        peers=[f"{giver.address}:{giver.agent_port}"],
    )
    begin = time.monotonic()
    report = await bench.make(wanted, taker)
    end = time.monotonic()
    assert report.move is not None
    of_giver = await _share(bench.streams, begin, end, giving)
    return {
        "error": report.move.error,
        "order to serving, s": round(end - begin, 2),
        "GB/s": round(bench.size / 1e9 / (end - begin), 2),
        "pause to continue, ms": round(report.move.stall_seconds * 1e3, 1),
        "decode of the giver, of base": round(of_giver, 3),
        "decode lost by the giver, ms": round((1 - of_giver) * (end - begin) * 1e3, 1),
        "decode of the taker, of base": round(await _share(streams, begin, end, taking), 3),
        "roots equal": report.engine.weights_root == root,
        "checksums equal": await bench.checksums(giver) == await bench.checksums(taker),
    }


async def final(bench: Bench, size: int) -> dict[str, Any]:
    """A whole version once more, and SGLang's checksums of it against those of what it loaded from disk itself."""
    other = await committed(bench, "Auto", size, PauseMode.IN_PLACE, "v2")
    between = await bench.checksums(bench.pod)
    row = await committed(bench, "Auto", size, PauseMode.RETRACT, "v1")
    found = await bench.checksums(bench.pod)
    return {
        "to v2": other,
        "back to v1": row,
        "checksums as loaded from disk": found == bench.from_disk,
        "each rank's differ between v1 and v2": all(a != b for a, b in zip(found, between, strict=True)),
        "ranks": len(found),
        "v1": [one[:12] for one in found],
        "v2": [one[:12] for one in between],
    }
