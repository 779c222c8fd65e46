"""Whether an engine that runs one set of tensors may load another: sentences that name what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .manifest import Tensor

NAMED = 3  # tensors that a sentence names before it counts the rest


def differences(
    offered: Mapping[str, Tensor],
    running: Mapping[str, Tensor],
    *,
    optional: Iterable[str] = (),
    subject: str = "the weights",
) -> list[str]:
    """Sentences, none when `offered` fits. `optional`: names that either may have without the other (a tied lm_head).
    A missing tensor would keep its old values and an unknown one only be logged by SGLang: both are differences."""
    free = set(optional)
    sentences = []
    changed = [
        f"{name} is {offered[name]}, the running model has {running[name]}"
        for name in sorted(offered.keys() & running.keys())
        if (offered[name].dtype, offered[name].shape) != (running[name].dtype, running[name].shape)
    ]
    if changed:
        sentences.append(f"wrong types or shapes in {subject}: {some(changed, '; ')}")
    if absent := sorted(running.keys() - offered.keys() - free):
        sentences.append(f"{subject} lack {some(absent)}, which the running model has")
    if unknown := sorted(offered.keys() - running.keys() - free):
        sentences.append(f"{subject} hold {some(unknown)}, which the running model does not have")
    return sentences


def some(items: Iterable[str], separator: str = ", ") -> str:
    """The first few, and how many more."""
    listed = list(items)
    rest = len(listed) - NAMED
    return separator.join(listed[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
