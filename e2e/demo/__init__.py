"""The main job on a real cluster, step by step, each with its time."""
