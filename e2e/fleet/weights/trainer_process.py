"""A trainer that publishes weights by the client, in a pod of the cluster: each publish is a process of its own, forked
from one that has torch already, so that it can be killed like a trainer that dies.

    POST /publish {"id", "fleet", "version", "model", ...}   begin; the words are those of `Publish`
    GET  /publish/<id>   {"state": running | holding | done | failed | killed, "told": the client's result or error}
    POST /go/<id>        let one that holds go on
    POST /kill/<id>      SIGKILL
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

# Behind the engine image's own packages: what the client needs and SGLang does not bring.
sys.path.append("/client")

import torch
from safetensors.torch import load_file

from sglang_rollout.client import Generation, RolloutFleet

PORT = 8000
FOLDER = Path("/tmp/publishes")
HOLD_SECONDS = 300.0
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SPOILED = "model.layers.0.mlp.up_proj.weight"
"""The tensor that `spoil` means."""


@dataclass(frozen=True)
class Publish:
    """call: publish, or prepare and commit, the two halves of one, or converse, which publishes between two turns.
    model: a folder with safetensors. options: of the client's call. spoil: see `spoiled`. hold_after: how many tensors
    are sent before it waits for a word to go on."""

    id: str
    fleet: str
    version: str
    model: str = ""
    call: str = "publish"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    spoil: str = ""
    hold_after: int | None = None


def tensors(order: Publish) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of their names, as a trainer would gather them."""
    held = Path(FOLDER, f"{order.id}.holding")
    go = Path(FOLDER, f"{order.id}.go")
    for number, (name, tensor) in enumerate(spoiled(order)):
        if number == order.hold_after:
            held.touch()
            deadline = time.monotonic() + HOLD_SECONDS
            while not go.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            held.unlink()
        yield name, tensor


def spoiled(order: Publish) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors with something wrong in one of them."""
    found = sorted(load_file(Path(order.model, "model.safetensors")).items())
    for name, tensor in [] if order.spoil == "empty" else found:
        if name != SPOILED:
            yield name, tensor
            continue
        match order.spoil:
            case "shape":
                yield name, tensor[:-1].contiguous()
            case "dtype":
                yield name, tensor.float()
            case "missing":
                continue
            case "unknown":
                yield name, tensor
                yield f"{name}.of_another_model", tensor
            case "duplicate":
                yield name, tensor
                yield name, tensor
            case "nan" | "inf":
                tensor = tensor.clone()
                tensor.view(-1)[7] = float(order.spoil)
                yield name, tensor
            case _:
                yield name, tensor


def run(order: Publish) -> dict[str, Any]:
    fleet = RolloutFleet.connect(order.fleet, namespace=NAMESPACE.read_text())
    if order.call == "commit":
        return dataclasses.asdict(fleet.commit(order.version, **order.options))
    if order.call == "converse":
        return {"turns": [dataclasses.asdict(turn) for turn in asyncio.run(converse(fleet, order))]}
    call = fleet.prepare if order.call == "prepare" else fleet.publish
    return dataclasses.asdict(call(order.version, lambda: tensors(order), **order.options))


async def converse(fleet: RolloutFleet, order: Publish) -> list[Generation]:
    """Two turns, the second by the weights that were published after the first."""
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    conversation = fleet.conversation(range(1, 9))
    first = await conversation.agenerate(sampling=sampling)
    await fleet.apublish(order.version, lambda: tensors(order), **order.options)
    second = await conversation.agenerate([9, 10], sampling=sampling)
    assert conversation.input_ids == [*range(1, 9), *first.output_ids, 9, 10, *second.output_ids]
    return [first, second, await asyncio.to_thread(fleet.generate, prompt="a", sampling=sampling)]


def in_child(order: Publish) -> None:
    """What it comes to is in a file: nobody waits for it."""
    begun = time.monotonic()
    try:
        told: dict[str, Any] = {"state": "done", "told": run(order)}
    except Exception as error:
        traceback.print_exc()
        told = {"state": "failed", "told": {"error": type(error).__name__, "message": str(error)}}
    beside = Path(FOLDER, f"{order.id}.new")
    beside.write_text(json.dumps({**told, "seconds": time.monotonic() - begun}, default=str))
    beside.rename(Path(FOLDER, f"{order.id}.json"))


class Door(BaseHTTPRequestHandler):
    """One call at a time, so that no thread is there when a process is forked."""

    children: ClassVar[dict[str, int]] = {}
    """Process ids of those that run, by id; 0 when it is over."""

    def do_GET(self) -> None:
        if self.path == "/livez":
            return self._answer(200, {})
        name = self.path.rpartition("/")[2]
        return self._answer(200, self._state(name))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        _, verb, *rest = self.path.split("/")
        if verb == "publish":
            known = {field.name for field in fields(Publish)}
            order = Publish(**{key: value for key, value in body.items() if key in known})
            child = os.fork()
            if child == 0:
                try:
                    self.connection.close()
                    in_child(order)
                finally:
                    sys.stdout.flush()
                    os._exit(0)
            self.children[order.id] = child
        elif verb == "kill":
            os.kill(self.children[rest[0]], signal.SIGKILL)
        elif verb == "go":
            Path(FOLDER, f"{rest[0]}.go").touch()
        self._answer(200, {})

    def _state(self, name: str) -> dict[str, Any]:
        child = self.children.get(name, 0)
        if child and os.waitpid(child, os.WNOHANG) != (0, 0):
            self.children[name] = 0
        told = Path(FOLDER, f"{name}.json")
        if told.exists():
            found: dict[str, Any] = json.loads(told.read_text())
            return found
        if self.children.get(name, 0) == 0:
            return {"state": "killed", "told": {}}
        holding = Path(FOLDER, f"{name}.holding").exists()
        return {"state": "holding" if holding else "running", "told": {}}

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if self.command != "GET":
            super().log_request(code, size)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    HTTPServer(("", PORT), Door).serve_forever()
