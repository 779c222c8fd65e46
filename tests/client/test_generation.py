"""generate() and conversations against a router of this machine: what is asked of SGLang, what is told of versions, and
that nothing is sent twice."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sglang_rollout.client import Conversation, FleetUnreachable, GenerateFailed, GenerateLost, VersionSpan
from sglang_rollout.client.generation import Router
from tests.free_ports import free_port

ANSWER = {
    "text": "four",
    "output_ids": [7, 8, 9],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "weight_version": "v2",
        "weight_versions": [
            {"version": "v1", "start": 0, "end": 1},
            {"version": "v2", "start": 1, "end": 3},
        ],
    },
}


class FakeRouter:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status, self.answer, self.cut = 200, json.dumps(ANSWER), False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.keys.append(self.headers.get("Authorization"))
                assert self.path == "/generate"
                if outer.cut:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.answer.encode())

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.close()


def fleet(url: str, **weights: str) -> dict[str, Any]:
    status = {"router": {"url": url}, "weights": {"version": "v2", "transaction": {"id": "t9"}}}
    return {"metadata": {"name": "fleet"}, "spec": {"weights": weights}, "status": status}


def client(router: FakeRouter, **weights: str) -> Router:
    return Router(lambda: fleet(router.url, **weights), api_key="secret")


def test_an_answer_tells_which_weights_computed_which_tokens(router: FakeRouter) -> None:
    asked = client(router)
    answer = asked.generate(prompt="2 + 2 =", sampling={"max_new_tokens": 3})
    asked.close()
    assert router.asked == [{"text": "2 + 2 =", "sampling_params": {"max_new_tokens": 3}}]
    assert router.keys == ["Bearer secret"]
    assert (answer.text, answer.output_ids, answer.finish, answer.version) == ("four", (7, 8, 9), "length", "")
    assert answer.versions == (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3))


async def test_edges_are_not_exact_under_in_place(router: FakeRouter) -> None:
    answer = await client(router, pauseMode="InPlace", kvCache="Keep").agenerate(input_ids=[1, 2])
    assert [span.exact for span in answer.versions] == [False, False]


async def test_a_kept_cache_is_not_used_for_other_weights(router: FakeRouter) -> None:
    await client(router, kvCache="Keep").agenerate(input_ids=[1])
    await client(router, kvCache="Flush").agenerate(input_ids=[1])
    assert [one.get("extra_key") for one in router.asked] == ["v2/t9", None]


async def test_one_label_is_that_of_all_tokens(router: FakeRouter) -> None:
    meta = {"weight_version": "v2", "completion_tokens": 4, "finish_reason": None}
    router.answer = json.dumps({"text": "x", "meta_info": meta})
    answer = await client(router).agenerate(prompt="a")
    assert (answer.version, answer.versions) == ("v2", (VersionSpan("v2", 0, 4),))


async def test_a_conversation_goes_on_with_its_own_tokens(router: FakeRouter) -> None:
    talk = Conversation(client(router), [1, 2])
    await talk.agenerate(sampling={})
    await talk.agenerate([3])
    assert [one["input_ids"] for one in router.asked] == [[1, 2], [1, 2, 7, 8, 9, 3]]
    assert talk.input_ids == [1, 2, 7, 8, 9, 3, 7, 8, 9]
    router.status = 503
    with pytest.raises(GenerateFailed):
        await talk.agenerate([4])
    assert talk.input_ids == [1, 2, 7, 8, 9, 3, 7, 8, 9]  # as it was


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_may_have_been_generated_is_not_sent_again(router: FakeRouter, asynchronous: bool) -> None:
    router.cut = True
    asked = client(router)
    ask = asked.agenerate if asynchronous else partial(asyncio.to_thread, asked.generate)
    with pytest.raises(GenerateLost, match="may have been generated") as caught:
        await ask(prompt="a")
    asked.close()
    assert caught.value.sent
    assert len(router.asked) == 1


async def test_what_was_never_sent_says_so() -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(GenerateLost, match="it was not sent") as caught:
        await Router(lambda: fleet(closed)).agenerate(prompt="a")
    assert not caught.value.sent


async def test_refusals_are_told_in_the_engine_s_words(router: FakeRouter) -> None:
    router.status, router.answer = 400, "the prompt is longer than the context"
    with pytest.raises(GenerateFailed, match="400: the prompt is longer"):
        await client(router).agenerate(prompt="a")
    router.status, router.answer = 200, "no json"
    with pytest.raises(GenerateFailed, match="another form than SGLang's"):
        await client(router).agenerate(prompt="a")


async def test_wrong_words() -> None:
    for words in ({}, {"prompt": "a", "input_ids": [1]}):
        with pytest.raises(ValueError, match="prompt or input_ids"):
            await Router(lambda: fleet("")).agenerate(**words)
    with pytest.raises(FleetUnreachable, match="has no router yet"):
        await Router(lambda: fleet("")).agenerate(prompt="a")
