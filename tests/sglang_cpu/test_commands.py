"""The engine's command line, and what the environment and the models are made from; nothing is installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.sglang_cpu import engine, environment, models
from e2e.sglang_cpu.errors import SGLangCpuError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_ROLLOUT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def installed() -> Path:
    folder = environment.folder()
    folder.mkdir(parents=True)
    (folder / "complete").write_text("")
    return folder


def test_one_rank(installed: Path) -> None:
    argv, env = engine.engine_command(Path("/models/m"), 30000, weight_version="1")
    assert argv[:3] == [str(installed / "bin/python3"), "-m", "sglang.launch_server"]
    assert "--tp-size" not in argv
    assert argv[-2:] == ["--weight-version", "1"]
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in env, "SGLang refuses a binding for one rank"


def test_two_nodes(installed: Path) -> None:
    argv, env = engine.engine_command(Path("/models/m"), 30000, tp=2, nodes=2, node_rank=1, rendezvous="10.0.0.1:30010")
    text = " ".join(argv)
    assert "--tp-size 2 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:30010" in text
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"admin_api_key": "a"}, "give both"),
        ({"api_key": "a"}, "give both"),
        ({"nodes": 2, "tp": 2}, "needs --rendezvous"),
    ],
)
def test_refused(installed: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(SGLangCpuError, match=message):
        engine.engine_command(Path("/m"), 1, **arguments)  # type: ignore[arg-type]


def test_a_half_made_environment_is_none(installed: Path) -> None:
    (installed / "complete").unlink()
    assert not environment.installed()
    with pytest.raises(SGLangCpuError, match="cpu install"):
        environment.interpreter()


def test_the_lock_is_whole() -> None:
    lines = [line for line in environment.LOCK_FILE.read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    names = {line.split("==")[0] for line in lines}
    assert {"sglang", "torch", "triton", "torchvision", "aiohttp"} <= names
    assert len(names) == len(lines)


def test_the_download_parts_are_the_lock() -> None:
    parts = environment.batches(environment.LOCK_FILE.read_text())
    lines = [line for line in environment.LOCK_FILE.read_text().splitlines() if "==" in line]
    assert sorted(line for part in parts for line in part) == sorted(lines)
    assert len(parts) > 10, "the large ones are fetched one by one"


def test_unknown_and_missing_models() -> None:
    with pytest.raises(SGLangCpuError, match="no model 'nope': there are"):
        models.path("nope")
    with pytest.raises(SGLangCpuError, match="cpu models"):
        models.path("qwen3-v1")


def test_model_keys_tell_models_apart() -> None:
    keys = [models._key(name) for name in models.MODELS]
    assert len(set(keys)) == len(keys)


def test_damage(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"x" * 100)
    models.truncate(tmp_path)
    assert weights.stat().st_size == 50
    for shard in (1, 2):
        (tmp_path / f"model-0000{shard}-of-00002.safetensors").write_bytes(b"x")
    models.lose_shard(tmp_path)
    assert [path.name for path in tmp_path.glob("model-*")] == ["model-00001-of-00002.safetensors"]
