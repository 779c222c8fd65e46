"""Writes docs/api.md from the models: `python -m sglang_rollout.api.reference [--output FILE]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .crd import PRINTER_COLUMNS, resource_schema
from .group import API_VERSION, KIND, PLURAL, SHORT_NAME
from .rule_index import placed_rules
from .structural import Schema
from .support import unsupported_paths

REFERENCE_FILE = Path(__file__).parents[3] / "docs" / "api.md"

_INTRODUCTION = f"""\
<!-- Written by `make crds` from operator/sglang_rollout/api: change the models, not this file. -->
# {KIND}

`apiVersion: {API_VERSION}`, `kind: {KIND}`, resource `{PLURAL}` (short name `{SHORT_NAME}`), namespaced, with the
subresources `status` and `scale`. `kubectl explain {SHORT_NAME}.spec --recursive` shows the same fields.

The operator never writes `spec`, annotations or finalizers of the resource; `status` is its alone. A field without a
default may be left out unless it is marked required. Quantities are written as in Kubernetes (`512Mi`, `0.5`, `8`).
A server-side apply by several owners merges `env` and containers by name; other lists have one owner.
"""


def render() -> str:
    """The file, byte for byte."""
    schema = resource_schema()
    parts = [_INTRODUCTION, _columns()]
    seen: dict[str, str] = {}
    for name in ("spec", "status"):
        parts += _sections(schema["properties"][name], name, seen)
    return "\n".join([*parts, _rules(), _unsupported()])


def _columns() -> str:
    rows = [
        (str(column["name"]), "yes" if column.get("priority") else "", f"`{column['jsonPath']}`")
        for column in PRINTER_COLUMNS
    ]
    return f"## Columns of `kubectl get {SHORT_NAME}`\n\n" + _table(("Column", "Only with `-o wide`", "From"), rows)


def _sections(schema: Schema, path: str, seen: dict[str, str]) -> Iterator[str]:
    """The object at `path`, then the objects in it; one that was shown before is only referred to."""
    rows = []
    children: list[tuple[str, Schema]] = []
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        place, inner = f"{path}.{name}", field
        if "items" in inner:
            place, inner = place + "[]", inner["items"]
        kind = _type(field)
        if "properties" in inner:
            key = json.dumps(inner["properties"], sort_keys=True)
            if key in seen:
                kind += f", as [{seen[key]}](#{_anchor(seen[key])})"
            else:
                seen[key] = place
                kind += f", see [below](#{_anchor(place)})"
                children.append((place, inner))
        rows.append((f"`{name}`", kind, _default(field, name in required), field.get("description", "")))
    yield f"## `{path}`\n\n{schema.get('description', '')}\n\n" + _table(("Field", "Type", "Default", "Meaning"), rows)
    for place, child in children:
        yield from _sections(child, place, seen)


def _anchor(path: str) -> str:
    """As GitHub makes it from a heading."""
    return "".join(letter for letter in path.lower() if letter.isalnum() or letter in "-_")


def _type(schema: Schema) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}" + _bounds(schema, "minItems", "maxItems", " entries")
    if "additionalProperties" in schema:
        return f"map to {_type(schema['additionalProperties'])}"
    if schema["type"] == "integer":
        return "integer" + _bounds(schema, "minimum", "maximum", "")
    if schema["type"] == "string":
        return ("time" if schema.get("format") == "date-time" else "string") + _bounds(
            schema, "minLength", "maxLength", " characters"
        )
    return str(schema["type"])


def _bounds(schema: Schema, low: str, high: str, unit: str) -> str:
    if low in schema and high in schema:
        return f", {schema[low]} to {schema[high]}{unit}"
    if high in schema:
        return f", at most {schema[high]}{unit}"
    return f", at least {schema[low]}{unit}" if low in schema else ""


def _default(schema: Schema, required: bool) -> str:
    if required:
        return "required"
    default: Any = schema.get("default")
    if default in (None, "", [], {}) or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default) if not isinstance(default, str) else default}`"


def _rules() -> str:
    rows = [(f"`{placed.path or 'metadata'}`", placed.rule.id, placed.rule.message) for placed in placed_rules()]
    return "## Rules\n\nThe API server refuses a resource that breaks one of these, with this sentence.\n\n" + _table(
        ("Where", "Rule", "Sentence"), rows
    )


def _unsupported() -> str:
    listed = "".join(f"- `{path}`\n" for path in unsupported_paths())
    return (
        "## Not done yet\n\nThese are accepted, and reported by a condition with reason `NotImplemented`"
        " when they are not at their default:\n\n" + listed
    )


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_rollout.api.reference", description=__doc__)
    parser.add_argument("--output", type=Path, default=REFERENCE_FILE, help="file to write (default: %(default)s)")
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
