"""Checks of bytes by torch and by NumPy, and a trainer's tensors as bytes: both must agree. Run by the interpreter that
has torch; says what differs and ends with 1."""

from __future__ import annotations

import random
import sys

import torch

from sglang_rollout.transfer.block_sums import BlockSums
from sglang_rollout.transfer.device_checks import block_sums, check_flat, check_flats, digest_flat
from sglang_rollout.transfer.digests import BLOCK_SUMS, digest
from sglang_rollout.transfer.host_checks import check_bucket
from sglang_rollout.transfer.manifest import Bucket
from sglang_rollout.transfer.outgoing import buckets_of
from sglang_rollout.transfer.transports import pieces_of

SIZES = (0, 1, 7, 8, 9, 65535, 65536, 65537, 200_000, 1 << 20)


def digests_agree() -> None:
    for size in SIZES:
        data = random.Random(size).randbytes(size)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
        pieces = BlockSums()
        begin = 0
        while begin < size:
            step = random.randrange(1, 100_000)
            pieces.update(memoryview(data)[begin : begin + step])
            begin += step
        whole = digest(BLOCK_SUMS, memoryview(data))
        assert pieces.hexdigest() == whole == digest_flat(BLOCK_SUMS, flat), size
        if size:
            other = bytearray(data)
            other[size // 2] ^= 1
            assert digest(BLOCK_SUMS, memoryview(other)) != whole, size
    assert block_sums(torch.zeros(0, dtype=torch.uint8)).numel() == 0


def checks_agree() -> None:
    model = {
        "a": torch.randn(300, 500, dtype=torch.bfloat16),
        "b": torch.randn(1000),
        "c": torch.full((4096,), 3e38),  # finite values whose sum is not
        "d": torch.tensor([1.0, float("nan"), float("inf"), -float("inf")], dtype=torch.float16),
        "e": torch.arange(10),
        "f": torch.zeros(0, 4),
        "g": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        "h": torch.tensor(True),
        "i": torch.full((5,), float("nan"), dtype=torch.float64),
    }
    (one,) = buckets_of(model.items(), 1 << 30)
    flat = torch.empty(one.bucket.size, dtype=torch.uint8)
    one.write_flat(flat)
    pieces = one.pieces()
    assert [len(piece) for piece in pieces] == [size for _, size in pieces_of(one.bucket)]
    assert torch.equal(torch.cat(pieces), flat)
    assert one.digest(BLOCK_SUMS, pieces) == digest_flat(BLOCK_SUMS, flat)
    on_host = check_bucket(memoryview(flat.numpy()), one.bucket, BLOCK_SUMS)
    on_gpu = check_flat(flat, one.bucket, BLOCK_SUMS)
    assert on_host.digest == on_gpu.digest
    assert on_host.nonfinite == on_gpu.nonfinite == {"d": 3, "g": 1, "i": 5}, (on_host, on_gpu)
    large = {"big": torch.randn(3 << 20), "small": torch.ones(7), "half": torch.ones(5 << 20, dtype=torch.bfloat16)}
    for two in buckets_of(large.items(), 64 << 20):
        whole = torch.empty(two.bucket.size, dtype=torch.uint8)
        two.write_flat(whole)
        assert len(two.pieces()) == 3
        assert torch.equal(torch.cat(two.pieces()), whole)
    words = {"w": torch.arange(1000), "x": torch.randn(64, 64)}
    (three,) = buckets_of(words.items(), 1 << 30)
    flat = torch.cat(three.pieces())
    host, gpu = (
        check_bucket(memoryview(flat.numpy()), three.bucket, BLOCK_SUMS),
        check_flat(flat, three.bucket, BLOCK_SUMS),
    )
    assert host == gpu
    # Several at once are found to be what each is alone.
    alone = [(whole, two.bucket), (flat, three.bucket), (torch.zeros(0, dtype=torch.uint8), Bucket(()))]
    assert check_flats(alone, BLOCK_SUMS) == [check_flat(*one, BLOCK_SUMS) for one in alone]
    assert check_flats([], BLOCK_SUMS) == []


if __name__ == "__main__":
    digests_agree()
    checks_agree()
    sys.exit(0)
