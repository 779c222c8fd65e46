"""What an engine must answer to an update before it is believed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_rollout.agent.engine_http import EngineError
from sglang_rollout.agent.sglang import SGLang
from sglang_rollout.protocol.weights import WeightVersion

Update = Callable[[SGLang], Coroutine[Any, Any, None]]
UPDATES: dict[str, Update] = {
    "label": lambda engine: engine.set_weight_version("2"),
    "disk": lambda engine: engine.load_from_disk(WeightVersion("2", "/models/2"), 5.0),
    "tensor": lambda engine: engine.update_weights_from_tensor({}, 5.0),
    "broadcast": lambda engine: engine.update_weights_from_distributed("group", (), 5.0),
}


async def told(update: Update, answer: Any) -> str:
    """The error; empty when the answer is believed."""

    async def reply(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_route("POST", "/{route}", reply)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        try:
            await update(SGLang(session, str(server.make_url("")).rstrip("/"), "data", "admin"))
        except EngineError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
@pytest.mark.parametrize("answer", [{"success": False, "message": "no"}, {"message": "yes"}, {"success": "true"}, None])
async def test_only_success_is_one(update: Update, answer: Any) -> None:
    assert await told(update, answer)
    assert not await told(update, {"success": True, "message": "", "new_version": "2"})


@pytest.mark.parametrize("answer", [{"new_version": "1"}, {"new_version": 2}, {}])
async def test_a_label_is_what_the_engine_says_of_it(answer: dict[str, Any]) -> None:
    assert "the engine says that it holds" in await told(UPDATES["label"], {"success": True, **answer})
