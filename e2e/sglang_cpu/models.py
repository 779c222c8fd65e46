"""The tiny models that tests, demo and examples serve, good ones and broken ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.layout import cache_root
from e2e.cluster.lock import exclusive
from e2e.cluster.process import run
from e2e.cluster.progress import step
from e2e.sglang_cpu import environment
from e2e.sglang_cpu.errors import SGLangCpuError
from e2e.sglang_cpu.variants import split_into_experts, widen_norms

WRITER = Path(__file__).parent / "write_model.py"
MOUNT_PATH = "/models"
"""Where engine pods see the folder of all models."""


@dataclass(frozen=True)
class Model:
    """A model made from a seed."""

    architecture: str = "qwen3"
    seed: int = 1
    hidden: int = 128
    shards: int = 1
    tied: bool = False

    def arguments(self) -> list[str]:
        """The words for the writer."""
        words = ["--architecture", self.architecture, "--seed", str(self.seed), "--hidden", str(self.hidden)]
        words += ["--shards", str(self.shards)]
        return [*words, "--tied"] if self.tied else words


@dataclass(frozen=True)
class Variant:
    """A copy of another model with something changed in it, or broken."""

    of: str
    change: Callable[[Path], None]


def truncate(folder: Path) -> None:
    """The tensor file ends in the middle: a trainer that was still writing, or died."""
    weights = folder / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size // 2)


def lose_shard(folder: Path) -> None:
    """The index names a file that is not there."""
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


MODELS: dict[str, Model | Variant] = {
    "qwen3-v1": Model(seed=1),
    "qwen3-v2": Model(seed=2),
    "qwen3-v3": Model(seed=3),
    "qwen3-sharded-v2": Model(seed=2, shards=3),
    "qwen3-tied-v1": Model(seed=1, tied=True),
    "qwen3-tied-v2": Model(seed=2, tied=True),
    "qwen3-other-shape": Model(seed=2, hidden=192),
    "llama-v1": Model(architecture="llama", seed=1),
    "llama-v2": Model(architecture="llama", seed=2),
    "qwen3-mixed-v1": Variant("qwen3-v1", widen_norms),
    "qwen3-mixed-v2": Variant("qwen3-v2", widen_norms),
    "qwen3-moe-v1": Variant("qwen3-v1", split_into_experts),
    "qwen3-moe-v2": Variant("qwen3-v2", split_into_experts),
    "qwen3-half-written": Variant("qwen3-v2", truncate),
    "qwen3-missing-shard": Variant("qwen3-sharded-v2", lose_shard),
}


def folder() -> Path:
    """The folder of all models."""
    return cache_root() / "models"


def path(name: str) -> Path:
    """One model's folder. Raises SGLangCpuError for an unknown name or a model that is not made yet."""
    if name not in MODELS:
        raise SGLangCpuError(f"no model {name!r}: there are {', '.join(MODELS)}")
    if not _current(name):
        raise SGLangCpuError(f"the model {name} is not made yet: python -m e2e.sglang_cpu models")
    return folder() / name


def make_all() -> dict[str, Path]:
    """Make the models that are missing or older than their description; the others stay as they are."""
    with exclusive(folder() / ".lock", "tiny models", timeout=600):
        missing = [name for name in MODELS if not _current(name)]
        if missing:
            with step(f"tiny models: {', '.join(missing)}"):
                for name in missing:
                    _make(name)
    return {name: folder() / name for name in MODELS}


def _mark(name: str) -> Path:
    return folder() / ".made" / name


def _key(name: str) -> str:
    model = MODELS[name]
    source = WRITER.read_bytes() + environment.LOCK_FILE.read_bytes()
    origin = _key(model.of) + model.change.__name__ if isinstance(model, Variant) else repr(model)
    return hashlib.sha256(source + origin.encode()).hexdigest()


def _current(name: str) -> bool:
    mark = _mark(name)
    return mark.exists() and mark.read_text() == _key(name) and (folder() / name / "config.json").exists()


def _make(name: str) -> None:
    """Write beside, then rename: a half-made model never stands under its name."""
    beside = folder() / f".{name}.new"
    shutil.rmtree(beside, ignore_errors=True)
    model = MODELS[name]
    if isinstance(model, Variant):
        shutil.copytree(folder() / model.of, beside)
        model.change(beside)
    else:
        beside.mkdir(parents=True)
        run([environment.interpreter(), WRITER, beside, *model.arguments()], timeout=120)
    for entry in beside.iterdir():
        entry.chmod(0o644)  # safetensors writes 0600, and engine pods run as another user
    final = folder() / name
    _mark(name).parent.mkdir(parents=True, exist_ok=True)
    _mark(name).unlink(missing_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    _mark(name).write_text(_key(name))


def tensor_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the headers of a model's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
