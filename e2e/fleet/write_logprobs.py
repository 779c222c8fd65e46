"""Prints the log probabilities that models give to the tokens of one prompt. Runs on the CPU engine's Python, with
transformers and without SGLang: what an engine answers is compared with it.

    python write_logprobs.py '[1, 2, 3]' MODEL_FOLDER...
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def prompt_logprobs(folder: str, prompt: list[int]) -> list[float]:
    """Of every token but the first, given those before it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].float()
    chosen = torch.log_softmax(logits[:-1], dim=-1)[range(len(prompt) - 1), prompt[1:]]
    return [float(value) for value in chosen]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    json.dump({folder: prompt_logprobs(folder, given) for folder in sys.argv[2:]}, sys.stdout)
