"""Which checkpoint each version label of a fleet stands for: what its answers are judged by."""

from __future__ import annotations

FIRST, SECOND = "qwen3-v1", "qwen3-v2"


class Journal:
    """Labels in the order in which the fleet moved to them, each with the name of its model."""

    def __init__(self) -> None:
        self.models = {"1": FIRST}

    @property
    def order(self) -> list[str]:
        return list(self.models)

    @property
    def current(self) -> str:
        return self.order[-1]

    @property
    def current_path(self) -> str:
        """Where engine pods see the current checkpoint."""
        return path_of(self.models[self.current])

    def next(self) -> tuple[str, str]:
        """A new label for another checkpoint than the current one, and where engine pods see it."""
        model = SECOND if self.models[self.current] == FIRST else FIRST
        label = str(len(self.models) + 1)
        self.models[label] = model
        return label, path_of(model)


def path_of(model: str) -> str:
    return f"/models/{model}"
