"""Random checkpoints of known shapes, with what SGLang needs beside them: configuration and a small tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_rollout.transfer.manifest import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
SHARD_BYTES = 4 << 30


def tensors(shape: str) -> Iterator[Tensor]:
    """All tensors of a Qwen3 of this shape, with an output layer of its own."""
    size = SHAPES[shape]
    hidden, inner, head = size["hidden_size"], size["intermediate_size"], size["head_dim"]
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
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, dimensions in layer.items():
            yield Tensor(f"model.layers.{number}.{name}.weight", "BF16", dimensions)
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    yield Tensor("lm_head.weight", "BF16", (size["vocab_size"], hidden))


def write_folder(folder: Path, shape: str) -> None:
    """Configuration and tokenizer, no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["weights move while tokens wait"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = Qwen3Config(
        max_position_embeddings=8192, eos_token_id=0, bos_token_id=0, tie_word_embeddings=False, **SHAPES[shape]
    ).to_dict()
    config |= {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def write_weights(folder: Path, shape: str, seed: int, device: str) -> int:
    """Files of safetensors with normal random values; returns their bytes."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors(shape):
        if sum(held.size for held in shards[-1]) + tensor.size > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(tensor)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        where |= {tensor.name: file for tensor in shard}
        with (folder / file).open("wb") as out:
            out.write(_header(shard))
            for tensor in shard:
                values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
                values.normal_(0, 0.02, generator=generator)
                out.write(memoryview(values.cpu().view(torch.uint8).reshape(-1).numpy()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(tensor.size for shard in shards for tensor in shard)


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
