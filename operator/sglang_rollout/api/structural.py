"""Turns pydantic's JSON schema into a structural schema that a CustomResourceDefinition accepts."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = (
    "type",
    "format",
    "description",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "minProperties",
)
_EXTENSION = "x-kubernetes-"


class NotStructuralError(ValueError):
    """A model uses something that a structural schema cannot say."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """The schema of `model` by JSON names: references written out, no null, and a default on every object with
    defaults inside, so that rules never meet an absent object ("no such key").

    Raises NotStructuralError, naming the field.
    """
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}), model.__name__)


def _convert(schema: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    schema = _resolve(schema, definitions)
    if schema.get("x-kubernetes-int-or-string"):
        return copy.deepcopy({key: value for key, value in schema.items() if key not in ("title", "default")}) | (
            _default(schema)
        )
    if "anyOf" in schema:
        schema = _without_null(schema, definitions, where)
    if "type" not in schema:
        raise NotStructuralError(f"{where}: a structural schema needs one type, found {sorted(schema)}")
    result = {key: schema[key] for key in _KEPT if key in schema}
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    result |= _default(schema)
    if schema["type"] == "object":
        result |= _object_parts(schema, definitions, where)
    if schema["type"] == "array":
        result["items"] = _convert(schema["items"], definitions, f"{where}[]")
    if result.get("type") == "integer":
        result["format"] = "int64" if schema.get("maximum", 2**63) >= 2**31 else "int32"
    return result | {key: copy.deepcopy(value) for key, value in schema.items() if key.startswith(_EXTENSION)}


def _resolve(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """The target of a $ref, with what stands beside the $ref (a field's own description and default) on top."""
    while "$ref" in schema:
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**definitions[schema["$ref"].rsplit("/", 1)[1]], **beside}
    return schema


def _without_null(schema: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    """An optional field: absent, never null."""
    options = [option for option in schema["anyOf"] if option.get("type") != "null"]
    if len(options) != 1:
        raise NotStructuralError(f"{where}: a field has one type, found {len(options)}")
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    merged = {**_resolve(options[0], definitions), **beside}
    return _without_null(merged, definitions, where) if "anyOf" in merged else merged


def _default(schema: Schema) -> Schema:
    """Written out in full: the API server checks a default against the rules before it fills in what is inside."""
    default = schema.get("default")
    return {} if default is None else {"default": _without_nulls(default)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list | tuple) else value


def _object_parts(schema: Schema, definitions: dict[str, Schema], where: str) -> Schema:
    parts: Schema = {}
    if properties := schema.get("properties"):
        parts["properties"] = {
            name: _convert(value, definitions, f"{where}.{name}") for name, value in properties.items()
        }
        if required := schema.get("required"):
            parts["required"] = sorted(required)
    elif isinstance(values := schema.get("additionalProperties"), dict) and values:
        parts["additionalProperties"] = _convert(values, definitions, f"{where}.*")
    return parts
