"""Every block of docs/client.md runs, in order, as it stands there; so does examples/trainer."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_rollout import client
from sglang_rollout.client import RolloutFleet
from sglang_rollout.client.generation import Router

from .conftest import WEIGHTS, Scene
from .test_generation import FakeRouter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/client.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TRAINER = ROOT / "examples/trainer"


@pytest.fixture
def connected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """connect() gives a client of the fleet in memory, if its words are right."""
    router, signature = FakeRouter(), inspect.signature(RolloutFleet.connect)

    def connect(*words: Any, **options: Any) -> RolloutFleet:
        signature.bind(*words, **options)
        made = scene.client()
        made._router = Router(made._resource.read, router.url)
        return made

    monkeypatch.setattr(RolloutFleet, "connect", connect)
    yield scene
    router.close()


def surroundings() -> dict[str, Any]:
    """What the page's reader has."""

    def all_gather_object(into: list[Any], mine: Any) -> None:
        into[:] = [mine]

    return {
        "asyncio": asyncio,
        "model": types.SimpleNamespace(state_dict=lambda: WEIGHTS),
        "torch": types.SimpleNamespace(distributed=types.SimpleNamespace(all_gather_object=all_gather_object)),
        "world": 1,
        "rank": 0,
        "prompts": ["1 + 1 =", "2 + 2 ="],
        "input_ids": [1, 2],
        "tool_output_ids": [3],
    }


async def test_every_block_of_the_page_runs(connected: Scene) -> None:
    names = surroundings()
    for block in BLOCKS:
        code = compile(block, "docs/client.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        # Blocks that do not await run in a thread: their calls block.
        if code.co_flags & inspect.CO_COROUTINE:
            await types.FunctionType(code, names)()
        else:
            await asyncio.to_thread(exec, code, names)
    assert connected.api.rollout("fleet")["status"]["weights"]["version"] == "48"


def test_what_the_page_speaks_of_exists() -> None:
    """Arguments, results and errors, by their names."""
    public = {name for name in client.__all__ if name in PAGE}
    errors = {
        name
        for name in client.__all__
        if inspect.isclass(kind := getattr(client, name)) and issubclass(kind, Exception)
    }
    assert errors <= public, "every error is explained"
    for call in ("publish", "prepare", "commit", "generate", "conversation", "version"):
        assert f"fleet.{call}(" in PAGE or f"`{call}()`" in PAGE
    told = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {name for cell in told for name in re.findall(r"`(\w+)`", cell)}
    arguments = set(inspect.signature(RolloutFleet.publish).parameters) - {"self"}
    fields = set(client.PublishResult.__dataclass_fields__)
    assert named == arguments | fields | errors - {"FleetError"}


def test_options_of_coroutines_are_those_of_the_calls() -> None:
    from sglang_rollout.client import fleet

    for call, options in (
        (RolloutFleet.publish, fleet.PublishOptions),
        (RolloutFleet.prepare, fleet.SendOptions),
        (RolloutFleet.generate, fleet.GenerateOptions),
    ):
        keywords = {n for n, p in inspect.signature(call).parameters.items() if p.kind is p.KEYWORD_ONLY}
        assert keywords == options.__optional_keys__


@contextmanager
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's program, where torch and safetensors are played."""

    class Opened:
        def keys(self) -> list[str]:
            return list(WEIGHTS)

        def get_tensor(self, name: str) -> bytes:
            return WEIGHTS[name]

    @contextmanager
    def safe_open(file: Path, framework: str) -> Iterator[Opened]:
        assert (file.suffix, framework) == (".safetensors", "pt")
        yield Opened()

    played: dict[str, dict[str, Any]] = {"torch": {"Tensor": bytes}, "safetensors": {"safe_open": safe_open}}
    for name, words in played.items():
        module = types.ModuleType(name)
        vars(module).update(words)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("publish", TRAINER / "publish.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    yield program


def test_the_example_publishes(
    connected: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").touch()
    with libraries(monkeypatch) as program:
        assert program.main("fleet", "v2", str(tmp_path)) == 0
        assert "version v2 serves; engines stood still for 0.250 s at most" in capsys.readouterr().out
        assert program.main("fleet", "v2", str(tmp_path)) == 1
        assert "knows version v2 already" in capsys.readouterr().err


def test_the_example_s_pod_fits_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = list(yaml.safe_load_all((TRAINER / "trainer.yaml").read_text()))
    kinds = {one["kind"]: one for one in objects}
    (container,) = kinds["Pod"]["spec"]["containers"]
    with libraries(monkeypatch) as program:
        assert container["ports"] == [{"name": "weights", "containerPort": program.PORT}]
        inspect.signature(program.main).bind(*container["command"][2:])
    fleet = yaml.safe_load((ROOT / "examples/gpu-8b.yaml").read_text())
    assert container["command"][2] == fleet["metadata"]["name"]
    assert {"get", "watch", "patch"} <= set(kinds["Role"]["rules"][0]["verbs"])
    labels = kinds["Pod"]["metadata"]["labels"]
    peers = fleet["spec"]["network"]["trainers"]
    assert any(peer.get("podSelector", {}).get("matchLabels") == labels for peer in peers)
