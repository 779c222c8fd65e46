"""Ours beside SGLang's own ways to move weights, on one GPU, under load, in one run: python -m bench.gpu."""
