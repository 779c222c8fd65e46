"""Real SGLang on a machine without a GPU: its environment, tiny models for it, and how to start it."""
