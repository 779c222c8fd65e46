"""What is put around SGLang's server: keys for WebSockets."""

from typing import Any

import pytest

from sglang_rollout.engine.serve import KeyedWebSockets

KEY = "the-data-key"


async def connect(kind: str, headers: list[tuple[bytes, bytes]], key: str | None) -> tuple[bool, list[Any]]:
    """Whether the server behind was reached, and what was sent."""
    reached, sent = [], list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await KeyedWebSockets(app, data_key=lambda: key)({"type": kind, "headers": headers}, receive, send)
    return bool(reached), sent


@pytest.mark.parametrize(
    ("kind", "header", "key", "allowed"),
    [
        ("websocket", None, KEY, False),
        ("websocket", b"Bearer wrong", KEY, False),
        ("websocket", KEY.encode(), KEY, False),
        ("websocket", f"Bearer {KEY}".encode(), KEY, True),
        ("websocket", None, None, True),
        ("http", None, KEY, True),  # SGLang's own middleware asks there
        ("lifespan", None, KEY, True),
    ],
)
async def test_a_websocket_needs_the_key(kind: str, header: bytes | None, key: str | None, allowed: bool) -> None:
    reached, sent = await connect(kind, [(b"authorization", header)] if header else [], key)
    assert reached is allowed
    assert sent == ([] if allowed else [{"type": "websocket.close", "code": 1008}])
