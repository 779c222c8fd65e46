"""Finds every admission rule of the resource and where it applies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .crd import resource_schema
from .owned_flags import ENGINE_FLAGS, ROUTER_FLAGS
from .schema import ApiModel, Rule


@dataclass(frozen=True)
class PlacedRule:
    """A rule and the JSON path that it is declared at ([] for list items); empty: the resource itself."""

    path: str
    rule: Rule


def placed_rules() -> list[PlacedRule]:
    """All rules of the CRD, in the order of its fields. Raises KeyError for one that no model declares."""
    by_content = {(rule.expression, rule.message): rule for rule in _declared_rules()}
    return [
        PlacedRule(path, by_content[content["rule"], content["message"]])
        for path, content in _rules_below(resource_schema(), "")
    ]


def _declared_rules() -> Iterator[Rule]:
    yield ENGINE_FLAGS.rule("engine-args-owned")
    yield ROUTER_FLAGS.rule("router-args-owned")
    for model in _models(ApiModel):
        yield from model.rules


def _models(model: type[ApiModel]) -> Iterator[type[ApiModel]]:
    yield model
    for child in model.__subclasses__():
        yield from _models(child)


def _rules_below(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, str]]]:
    for content in schema.get("x-kubernetes-validations", ()):
        yield path, content
    for name, child in schema.get("properties", {}).items():
        yield from _rules_below(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from _rules_below(schema["items"], f"{path}[]")
