"""The engine's log: passed on, without keys, and searched for loads that failed on a rank nobody hears of."""

import io
import os

import pytest

from sglang_rollout.engine.log_pump import KEPT_LINES, LogPump


def pumped(text: bytes, secrets: list[str]) -> tuple[LogPump, bytes, list[str]]:
    read, write = os.pipe()
    os.write(write, text)
    os.close(write)
    sink, heard = io.BytesIO(), list[str]()
    pump = LogPump(os.fdopen(read, "rb"), sink, secrets, heard.append)
    pump.start()
    pump.join(5)
    return pump, sink.getvalue(), heard


def test_keys_never_pass() -> None:
    pump, passed, _ = pumped(b"args: api_key='k1' admin_api_key='k2'\nok\nlast k1", ["k1", "k2", ""])
    assert passed == b"args: api_key='***' admin_api_key='***'\nok\nlast ***"
    assert pump.lines() == ["args: api_key='***' admin_api_key='***'", "ok", "last ***"]


def test_only_the_last_lines_are_kept() -> None:
    pump, _, _ = pumped(b"".join(b"%d\n" % n for n in range(KEPT_LINES + 5)), [])
    assert pump.lines()[0] == "5"
    assert len(pump.lines()) == KEPT_LINES


def test_bytes_that_are_no_text_pass() -> None:
    pump, passed, _ = pumped(b"\xff\xfe\n", [])
    assert passed == b"\xff\xfe\n"
    assert len(pump.lines()) == 1


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        (b"[2026-11-29 18:01:35 TP1] Failed to get weights iterator: no such folder.", True),
        (b"[2026-11-29 18:01:35 DP0 TP12 EP0] Failed to update weights: shape.", True),
        (b"[2026-11-29 18:01:35 TP0] Failed to update weights: shape.", False),
        (b"[2026-11-29 18:01:35] Failed to update weights: shape.", False),
        (b"[2026-11-29 18:01:35 TP1] Update weights end.", False),
    ],
)
def test_a_load_that_failed_beside_rank_0_is_heard(line: bytes, heard: bool) -> None:
    assert bool(pumped(line, [])[2]) is heard
