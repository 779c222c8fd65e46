"""Writes the CustomResourceDefinition from the models: `python -m sglang_rollout.api.crd [--output FILE]`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from .group import CRD_NAME, GROUP, KIND, LIST_KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION
from .rollout import SGLangRollout
from .structural import structural_schema

_ROOT = Path(__file__).parents[3]
CRD_FILE = _ROOT / "crds" / f"{PLURAL}.{GROUP}.yaml"
CHART_FILE = _ROOT / "charts" / "sglang-rollout" / "files" / "crd.yaml"  # Helm reads no file outside of its chart
_HEADER = "# Written by `make crds` from operator/sglang_rollout/api: change the models, not this file.\n"


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    _column("Engines", "integer", ".status.replicas", "Engines that exist"),
    _column("Ready", "integer", ".status.readyReplicas", "Engines whose every pod is Ready"),
    _column("Routable", "integer", ".status.routableReplicas", "Engines in the router, at an allowed version"),
    _column("State", "string", ".status.executionState", "Running, Pausing, Paused or Resuming"),
    _column("Weights", "string", ".status.weights.version", "What every routable engine serves"),
    _column("Target", "string", ".status.weights.targetVersion", "What the fleet should serve", wide=True),
    _column("Status", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether the fleet is as asked"),
    _column("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why", wide=True),
    _column("Age", "date", ".metadata.creationTimestamp", "Since when it exists"),
)


def resource_schema() -> dict[str, Any]:
    """openAPIV3Schema of the resource. The API server checks apiVersion, kind and metadata itself."""
    schema = structural_schema(SGLangRollout)
    properties = schema["properties"]
    properties["metadata"] = {"type": "object"}
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    properties["status"] = _without_defaults(properties["status"])
    schema["required"] = ["spec"]
    return schema


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Status is what its writer wrote: the API server adds nothing."""
    return {
        key: {name: _without_defaults(child) for name, child in value.items()}
        if key == "properties"
        else _without_defaults(value)
        if key == "items"
        else value
        for key, value in schema.items()
        if key != "default"
    }


def custom_resource_definition() -> dict[str, Any]:
    """The manifest that users apply."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": list(PRINTER_COLUMNS),
        "schema": {"openAPIV3Schema": resource_schema()},
    }
    names = {
        "kind": KIND,
        "listKind": LIST_KIND,
        "plural": PLURAL,
        "singular": SINGULAR,
        "shortNames": [SHORT_NAME],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
    }


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    """The file in crds/ and in the chart, byte for byte."""
    body: str = yaml.dump(
        custom_resource_definition(), Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True
    )
    return _HEADER + body


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_rollout.api.crd", description=__doc__)
    parser.add_argument("--output", type=Path, help="file to write (default: those in crds/ and in the chart)")
    chosen: Path | None = parser.parse_args().output
    for output in (CRD_FILE, CHART_FILE) if chosen is None else (chosen,):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
