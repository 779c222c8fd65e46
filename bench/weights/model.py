"""A model's tensors by name, of about the size asked for, with the shapes of a small Qwen3. Needs torch."""

from __future__ import annotations

from typing import Any

VOCABULARY, HIDDEN, INNER = 32_768, 1024, 3072
BYTES = 2


def shapes(size: int) -> dict[str, tuple[int, ...]]:
    """size in bytes; with one layer at least, which makes 88 MiB."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    number = 0
    while number == 0 or total(found) + total(layer) <= size:
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return {**found, "model.norm.weight": (HIDDEN,)}


def total(listed: dict[str, tuple[int, ...]]) -> int:
    """In bytes, as bfloat16."""
    count = 0
    for shape in listed.values():
        elements = 1
        for dimension in shape:
            elements *= dimension
        count += elements * BYTES
    return count


def tensors(size: int) -> dict[str, Any]:
    """With values, since zeros would be no weights."""
    import torch

    torch.manual_seed(1)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes(size).items()}
