"""What is put around SGLang's server: keys for WebSockets."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_rollout.engine.serve import KeyedWebSockets, add_ready

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


class Routes:
    """As much of SGLang's http_server as its routes are."""

    class Response:
        def __init__(self, status_code: int) -> None:
            self.status_code = status_code

    def __init__(self, paths: list[str]) -> None:
        self.manager = SimpleNamespace(is_pause=False)
        self.added: dict[str, Any] = {}
        self.app = SimpleNamespace(routes=[SimpleNamespace(path=path) for path in paths], add_route=self._add)

    def _add(self, path: str, endpoint: Any, methods: list[str]) -> None:
        assert methods == ["GET"]
        self.added[path] = endpoint

    def get_global_state(self) -> Any:
        return SimpleNamespace(tokenizer_manager=self.manager)


async def test_readiness_is_added_where_it_is_missing() -> None:
    older = Routes(["/health"])
    add_ready(older)
    assert (await older.added["/ready"](None)).status_code == 200
    older.manager.is_pause = True
    assert (await older.added["/ready"](None)).status_code == 503
    newer = Routes(["/health", "/ready"])
    add_ready(newer)
    assert newer.added == {}
