"""JSON for the messages of this package: frozen dataclasses with snake_case fields, camelCase on the wire.

Unknown fields are ignored, so an agent and an operator of neighbouring releases understand each other.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache, partial
from typing import Any, TypeVar

from cattrs import Converter
from cattrs.errors import BaseValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

T = TypeVar("T")


class MalformedMessage(ValueError):
    """A message that does not have the form that the protocol gives it."""


def camel(name: str) -> str:
    """snake_case -> camelCase, the way pydantic's to_camel does for the resource."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _build() -> Converter:
    converter = Converter(detailed_validation=False)

    def renamed(cls: type) -> dict[str, Any]:
        return {f.name: override(rename=camel(f.name)) for f in dataclasses.fields(cls)}

    def structure(cls: type, converter: Converter) -> Any:
        return make_dict_structure_fn(cls, converter, _cattrs_detailed_validation=False, **renamed(cls))

    def unstructure(cls: type, converter: Converter) -> Any:
        return make_dict_unstructure_fn(cls, converter, **renamed(cls))

    converter.register_structure_hook_factory(dataclasses.is_dataclass, partial(structure, converter=converter))
    converter.register_unstructure_hook_factory(dataclasses.is_dataclass, partial(unstructure, converter=converter))
    return converter


_CONVERTER = _build()
_JSON = json.JSONEncoder(separators=(",", ":"))


def to_wire(message: Any) -> dict[str, Any]:
    """A message as the plain object that goes over the wire."""
    return _CONVERTER.unstructure(message)  # type: ignore[no-any-return]


def dumps(message: Any) -> bytes:
    return _JSON.encode(to_wire(message)).encode()


class BatchEncoder:
    """Encodes many messages of which most parts are the very same objects: each of these is encoded once. Parts must
    not change while it lives."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str]] = {}  # by id; with the part, so that no other gets its id

    def members(self, message: Any, without: frozenset[str]) -> bytes:
        """The members of the message's JSON object, without its braces and without those of these fields."""
        parts = [
            key + self._text(getattr(message, name)) for name, key in _keys(message.__class__) if name not in without
        ]
        return ",".join(parts).encode()

    def _text(self, part: Any) -> str:
        known = self._texts.get(id(part))
        if known is None:
            known = self._texts[id(part)] = part, _JSON.encode(to_wire(part))
        return known[1]


@lru_cache
def _keys(cls: type) -> tuple[tuple[str, str], ...]:
    """Each field's name, and its key in JSON with the colon."""
    return tuple((field.name, f'"{camel(field.name)}":') for field in dataclasses.fields(cls))


def from_wire(cls: type[T], data: Any) -> T:
    """The message of type `cls` in a decoded JSON value. Raises MalformedMessage."""
    try:
        return _CONVERTER.structure(data, cls)
    except (BaseValidationError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise MalformedMessage(f"not a {cls.__name__}: {type(error).__name__}: {error}") from error


def loads(cls: type[T], body: bytes | str) -> T:
    """The message of type `cls` in a JSON text. Raises MalformedMessage."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise MalformedMessage(f"not a {cls.__name__}: not JSON: {error}") from error
    return from_wire(cls, data)
