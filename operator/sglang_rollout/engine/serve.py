"""SGLang's own server with what it has no flags for: what it tells of its settings needs the admin key, its WebSockets
need a key at all, its served model name outlives weight updates, and /ready is there also in releases before it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

# Run by path, Python puts this folder first on the import path; nothing here may hide a module of SGLang's.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]


class FirstValueHolds:
    """An attribute that keeps the first value it is given, on each object. SGLang renames the served model to the
    new checkpoint's folder after /update_weights_from_disk (managers/tokenizer_manager.py); clients must not see
    the name change with the weights."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_first_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self._slot]
        except KeyError:
            raise AttributeError(self._slot.removeprefix("_first_")) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__.setdefault(self._slot, value)


def pin(owner: type, name: str) -> None:
    attribute = FirstValueHolds()
    attribute.__set_name__(owner, name)
    setattr(owner, name, attribute)


class KeyedWebSockets:
    """ASGI middleware: refuses a WebSocket without the data key. SGLang's own asks for keys on HTTP requests only
    (utils/auth.py). `data_key` is read when a connection comes, since the settings are parsed later than this."""

    def __init__(self, app: Any, data_key: Callable[[], str | None]) -> None:
        self._app = app
        self._data_key = data_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket" and not self._allowed(scope):
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        key = self._data_key()
        given = dict(scope["headers"]).get(b"authorization", b"")
        return key is None or secrets.compare_digest(given, f"Bearer {key}".encode())


def add_ready(http_server: Any) -> None:
    """/ready as SGLang 0.5.23 answers it, for releases that do not tell whether they are paused."""
    if any(getattr(route, "path", "") == "/ready" for route in http_server.app.routes):
        return

    async def ready(request: Any) -> Any:
        manager = http_server.get_global_state().tokenizer_manager
        return http_server.Response(status_code=503 if manager.is_pause else 200)

    http_server.app.add_route("/ready", ready, methods=["GET"])


def prepare() -> None:
    """Sets all of it up before SGLang builds its server."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # as SGLang's own entry point does, before the modules below are imported
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import AuthLevel, auth_level

    # Both print the API keys, admin key included, to whoever holds the data key, as every router does.
    for endpoint in (http_server.server_info, http_server.get_server_info):
        auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
    add_ready(http_server)
    http_server.app.add_middleware(KeyedWebSockets, data_key=lambda: get_serving().api_key)
    pin(TokenizerManager, "served_model_name")


def main() -> None:
    import runpy

    prepare()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
