"""Random checkpoints of known shapes, with what SGLang needs beside them: configuration and a small tokenizer.

python -m bench.gpu.models FOLDER SHAPE SEED DEVICE writes one."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sglang_rollout.transfer.manifest import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "tiny-moe": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "num_experts": 8,
                 "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "moe-many": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 48, "num_attention_heads": 2,
                 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "num_experts": 128,
                 "num_experts_per_tok": 8, "moe_intermediate_size": 32},
    "30b-a3b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
SHARD_BYTES = 4 << 30
POOL_BYTES = 256 << 20
THREADS = 8


def tensors(shape: str) -> Iterator[Tensor]:
    """All tensors of a Qwen3 or Qwen3-MoE of this shape, with an output layer of its own."""
    size = SHAPES[shape]
    hidden, head = size["hidden_size"], size["head_dim"]
    queries, keys = size["num_attention_heads"] * head, size["num_key_value_heads"] * head
    yield Tensor("model.embed_tokens.weight", "BF16", (size["vocab_size"], hidden))
    for number in range(size["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            **_feed_forward(size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, dimensions in layer.items():
            yield Tensor(f"model.layers.{number}.{name}.weight", "BF16", dimensions)
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    yield Tensor("lm_head.weight", "BF16", (size["vocab_size"], hidden))


def _feed_forward(size: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts = size["hidden_size"], size.get("num_experts", 0)
    inner = size["moe_intermediate_size" if experts else "intermediate_size"]
    one = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not experts:
        return {f"mlp.{name}": dimensions for name, dimensions in one.items()}
    return {"mlp.gate": (experts, hidden)} | {
        f"mlp.experts.{expert}.{name}": dimensions for expert in range(experts) for name, dimensions in one.items()
    }


class Values:
    """Bytes of normal random bf16 for each tensor of one version: parts of one pool, from a place that the tensor's
    name decides, since making every byte anew would take longer than anything that is measured."""

    def __init__(self, seed: int, device: str, size: int) -> None:
        """`size`: of all tensors; a small model gets a small pool."""
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        pool = torch.empty(min(POOL_BYTES, size) // 2, dtype=torch.bfloat16, device=device)
        pool.normal_(0, 0.02, generator=generator)
        self.pool = memoryview(pool.cpu().view(torch.uint8).numpy())

    def spans(self, tensor: Tensor) -> Iterator[slice]:
        """Parts of the pool, which follow each other in the tensor."""
        at = zlib.crc32(tensor.name.encode()) * 2 % len(self.pool)
        left = tensor.size
        while left:
            end = min(at + left, len(self.pool))
            yield slice(at, end)
            left -= end - at
            at = 0

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        for span in self.spans(tensor):
            yield self.pool[span]

    def write_into(self, view: memoryview, tensor: Tensor) -> None:
        """By NumPy, which lets other threads run meanwhile."""
        into = np.frombuffer(view, np.uint8)
        at = 0
        for piece in self.pieces(tensor):
            into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)


def total_bytes(shape: str) -> int:
    return sum(tensor.size for tensor in tensors(shape))


def write_folder(folder: Path, shape: str) -> None:
    """Configuration and tokenizer, no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["weights move while tokens wait"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    experts = "num_experts" in SHAPES[shape]
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        max_position_embeddings=8192, eos_token_id=0, bos_token_id=0, tie_word_embeddings=False, **SHAPES[shape]
    ).to_dict()
    config |= {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, default=str))


def write_weights(folder: Path, shape: str, values: Values, threads: int) -> None:
    """Files of safetensors."""
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors(shape):
        if sum(held.size for held in shards[-1]) + tensor.size > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(tensor)
    where: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        tasks = []
        for number, shard in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            where |= {tensor.name: file for tensor in shard}
            tasks.append(pool.submit(_write_shard, folder / file, shard, values))
        for task in tasks:
            task.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _write_shard(path: Path, shard: list[Tensor], values: Values) -> None:
    with path.open("wb") as out:
        out.write(_header(shard))
        for tensor in shard:
            for piece in values.pieces(tensor):
                out.write(piece)


def _header(shard: list[Tensor]) -> bytes:
    begin = 0
    entries = {}
    for tensor in shard:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.size],
        }
        begin += tensor.size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


if __name__ == "__main__":
    _, path, shape, seed, device = sys.argv
    Path(path).mkdir(parents=True, exist_ok=True)
    write_folder(Path(path), shape)
    write_weights(Path(path), shape, Values(int(seed), device, total_bytes(shape)), THREADS)
