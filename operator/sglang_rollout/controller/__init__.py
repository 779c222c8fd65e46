"""The operator's process: everything that it reads and writes. What to do is decided in sglang_rollout.transitions."""
