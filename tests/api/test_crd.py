"""The files in crds/ and docs/ are what the models say, and the schema is one that rules can rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from sglang_rollout.api import crd, reference
from sglang_rollout.api.rule_index import placed_rules
from sglang_rollout.api.schema import ApiModel
from sglang_rollout.api.structural import NotStructuralError, structural_schema

OPEN_FIELDS = {
    "spec.model.volume",
    "spec.engine.env[].valueFrom",
    *(
        f"spec.{owner}.template.spec{part}"
        for owner in ("engine", "router")
        for part in (
            "",
            *(
                f".{kind}[]{field}"
                for kind in ("containers", "initContainers")
                for field in ("", ".ports[]", ".livenessProbe", ".readinessProbe", ".startupProbe", ".lifecycle")
            ),
        )
    ),
}


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}.*")


FIELDS = list(walk(crd.resource_schema()))


@pytest.mark.parametrize(
    ("path", "content"),
    [(crd.CRD_FILE, crd.render()), (reference.REFERENCE_FILE, reference.render())],
    ids=["crd", "reference"],
)
def test_written_file_is_current(path: Path, content: str) -> None:
    assert path.read_text(encoding="utf-8") == content, "run `make crds`"


def test_only_kubernetes_own_objects_are_open() -> None:
    assert {path for path, schema in FIELDS if schema.get("x-kubernetes-preserve-unknown-fields")} == OPEN_FIELDS


def test_lists_maps_and_strings_are_bounded() -> None:
    """Else the API server estimates the cost of rules as unbounded, and one resource can be megabytes."""
    unbounded = [
        path
        for path, schema in FIELDS
        if path.startswith("spec")
        and ".template." not in path
        and not schema.get("enum")
        and {"array": "maxItems", "string": "maxLength"}.get(schema.get("type", ""), "type") not in schema
        and not schema.get("x-kubernetes-int-or-string")
    ]

    assert unbounded == []


def test_every_list_says_how_it_merges() -> None:
    lists = [(path, schema) for path, schema in FIELDS if schema.get("type") == "array"]

    assert [path for path, schema in lists if "x-kubernetes-list-type" not in schema] == []


def test_what_has_one_member_for_each_type_is_applied_as_one() -> None:
    def members(schema: dict[str, Any]) -> set[str]:
        types = schema.get("properties", {}).get("type", {}).get("enum", [])
        names = {value[0].lower() + value[1:] for value in types}
        return names.intersection(schema.get("properties", {}))

    unions = {path: schema.get("x-kubernetes-map-type") for path, schema in FIELDS if members(schema)}

    assert unions == {"spec.weights.source": "atomic", "spec.weights.prepare.source": "atomic"}


def test_objects_of_the_spec_are_there_when_a_rule_looks() -> None:
    spec = dict(FIELDS)["spec"]
    optional = {"weightCheck", "profile", "flushCache", "abortRequests", "restart"}

    without_default = {
        name for name, child in spec["properties"].items() if child["type"] == "object" and "default" not in child
    }

    assert without_default - set(spec["required"]) == optional


def test_every_field_is_described() -> None:
    described = [(path, schema) for path, schema in FIELDS if path.startswith(("spec", "status"))]
    missing = [path for path, schema in described if not path.endswith(("[]", ".*")) and not schema.get("description")]

    assert missing == []


def test_reference_names_every_field() -> None:
    text = reference.render()

    assert [path for path, _ in FIELDS if path.count(".") and f"`{path.rsplit('.', 1)[1].rstrip('[]')}`" not in text
            and not path.endswith(".*")] == []  # fmt: skip


def test_every_rule_says_what_to_write() -> None:
    messages = [placed.rule.message for placed in placed_rules()]

    assert all(40 < len(message) < 400 for message in messages)


class TwoTypes(ApiModel):
    either: int | str = 1


class Nested(ApiModel):
    """Inner."""

    count: Annotated[int, Field(ge=1)] = 3
    name: str | None = None


class Outer(ApiModel):
    """Outer."""

    nested: Nested = Field(default=Nested(), description="Field's own words.")
    maybe: Nested | None = None


def test_two_types_are_refused() -> None:
    with pytest.raises(NotStructuralError, match=r"TwoTypes\.either"):
        structural_schema(TwoTypes)


def test_conversion() -> None:
    inner = {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 1, "default": 3, "format": "int64"},
            "name": {"type": "string"},
        },
    }

    assert structural_schema(Outer) == {
        "type": "object",
        "description": "Outer.",
        "properties": {
            "nested": {**inner, "description": "Field's own words.", "default": {"count": 3}},
            "maybe": {**inner, "description": "Inner."},
        },
    }
