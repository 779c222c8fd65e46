"""Writes the CEL expressions that would be long and error-prone by hand."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def literal(value: Any) -> str:
    """A string, bool or integer as CEL."""
    return json.dumps(value).replace('"', "'") if isinstance(value, str) else json.dumps(value)


def string_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(literal(value) for value in values) + "]"


def is_default(model: BaseModel, path: str) -> str:
    """True when every field below `path` has the value that `model` has: nothing was set there.

    Defaults are filled in before rules run, so a rule cannot see whether a field was written, only its value.
    """
    fields = type(model).model_fields
    terms = [_field_is_default(getattr(model, name), field, path) for name, field in fields.items()]
    return " && ".join(terms)


def _field_is_default(value: Any, field: FieldInfo, path: str) -> str:
    here = f"{path}.{field.alias}"
    if value is None:
        return f"!has({here})"
    if isinstance(value, BaseModel):
        # An open object has no default inside: any content counts as set.
        if type(value).model_config.get("extra") == "allow":
            return " && ".join(f"!has({here}.{f.alias})" for f in type(value).model_fields.values())
        return is_default(value, here)
    if isinstance(value, tuple | dict):
        return f"size({here}) == 0"
    return f"{here} == {literal(value)}"


def same_weights(left: str, right: str) -> str:
    """True when two weight sources name the same bytes; where the trainer's senders are does not count."""
    disk = f"(!has({left}.disk) || {left}.disk.path == {right}.disk.path)"
    distributed = (
        f"(!has({left}.distributed) || ({left}.distributed.transfer == {right}.distributed.transfer"
        f" && {left}.distributed.transport == {right}.distributed.transport))"
    )
    members = f"has({left}.disk) == has({right}.disk) && has({left}.distributed) == has({right}.distributed)"
    # What is colocated is its senders, and where these are does not count.
    return f"{left}.type == {right}.type && {members} && {disk} && {distributed}"
