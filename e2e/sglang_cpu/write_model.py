"""Writes one tiny random model: config, byte-level tokenizer and safetensors. Runs on the CPU engine's Python.

Every byte follows from the arguments: the tensors from the seed (one generator, drawn in name order), the
tokenizer from a fixed corpus.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = (
    "reinforcement learning rollouts",
    "new weights are published and every engine serves the same version",
    "the router sends a request to an engine and the engine answers",
    "What is 2 + 3? The answer is 5.",
    "0123456789 + - = ( ) . , ? !",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 384
POSITIONS = 8192
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Wide enough that greedy decoding does not hang on one token and two seeds give different texts.
WEIGHT_DEVIATION = 0.08


def model_config(architecture: str, hidden: int, layers: int, tied: bool) -> dict[str, Any]:
    """The config.json of a transformers model of this shape."""
    heads, kv_heads = 4, 2
    config: dict[str, Any] = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[architecture]],
        "model_type": architecture,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    }
    if architecture == "llama":
        config["mlp_bias"] = False
    return config


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes, as transformers names them."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": (hidden,),
            f"{block}.self_attn.q_proj.weight": (query, hidden),
            f"{block}.self_attn.k_proj.weight": (key, hidden),
            f"{block}.self_attn.v_proj.weight": (key, hidden),
            f"{block}.self_attn.o_proj.weight": (hidden, query),
            f"{block}.post_attention_layernorm.weight": (hidden,),
            f"{block}.mlp.gate_proj.weight": (inner, hidden),
            f"{block}.mlp.up_proj.weight": (inner, hidden),
            f"{block}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            shapes |= {
                f"{block}.self_attn.q_norm.weight": (head,),
                f"{block}.self_attn.k_norm.weight": (head,),
            }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 tensors: norms near one, everything else normal around zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        values = torch.randn(shape, generator=generator) * WEIGHT_DEVIATION
        tensors[name] = (values + 1.0 if len(shape) == 1 else values).to(torch.bfloat16)
    return tensors


def write_tensors(target: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """One model.safetensors, or `shards` files and their index."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, target / "model.safetensors", metadata=metadata)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = {name: tensors[name] for name in names[shard::shards]}
        save_file(members, target / file_name, metadata=metadata)
        weight_map |= dict.fromkeys(members, file_name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def write_tokenizer(target: Path) -> None:
    """A byte-level BPE tokenizer with a chat template; any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="an existing, empty folder")
    parser.add_argument("--architecture", choices=("qwen3", "llama"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tied", action="store_true", help="the output layer is the embedding")
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()

    config = model_config(options.architecture, options.hidden, options.layers, options.tied)
    (options.target / "config.json").write_text(json.dumps(config, indent=2))
    (options.target / "generation_config.json").write_text(
        json.dumps({key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}, indent=2)
    )
    write_tokenizer(options.target)
    write_tensors(options.target, random_tensors(tensor_shapes(config), options.seed), options.shards)


if __name__ == "__main__":
    main()
