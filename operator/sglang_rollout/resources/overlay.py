"""Lays a user's pod overlay over a rendered pod template: maps by key, named lists by name, other lists replaced.

It is what a strategic merge does, less its patch directives. What the operator owns cannot be changed: an overlay
that tries is refused with a sentence, also where the API server's rules do not look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..api.names import (
    CONTAINER_AGENT,
    CONTAINER_ENGINE,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
)
from ..api.overlay import PodOverlay
from .identity import Manifest


class UnusableSpec(ValueError):
    """A part of the resource that no pod can be made from; the text says where, and what to write instead."""


# Lists whose entries are one thing when these keys are equal (patchMergeKey in core/v1, tolerations aside:
# the API has none for them, and a user who writes one for the same taint and effect means to replace ours).
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "tolerations": ("key", "effect"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "claims": ("name",),
}
# Entries of these lists are merged with each other; those of the other lists replace each other.
_DEEP_LISTS = frozenset({"containers", "initContainers"})

_OWNED_POD_FIELDS = {
    "restartPolicy": "pods of a fleet restart Always",
    "hostname": "it is the pod's name",
    "subdomain": "it is the engine's Service",
    "hostNetwork": "use network.hostNetwork",
    "schedulerName": "use scheduling.schedulerName",
    "shareProcessNamespace": "it follows from agent.gpuAccess",
    "automountServiceAccountToken": "pods of a fleet hold no token; mount a projected volume where you need one",
    "nodeName": "use nodeSelector or affinity",
}
_OWNED_CONTAINER_FIELDS = {
    "image": "use engine.image, agent.image or router.image",
    "command": "it is the operator's",
    "args": "use engine.args or router.args",
    "ports": "they are the operator's",
    "livenessProbe": "it is the operator's",
    "readinessProbe": "it is the operator's",
    "startupProbe": "it is the operator's",
    "lifecycle": "use terminationGracePeriodSeconds of the overlay for a longer drain",
    "restartPolicy": "it is the operator's",
}
_OWNED_LABELS = frozenset({LABEL_MANAGED_BY, LABEL_NAME, LABEL_COMPONENT})
_OWNED_PREFIX = "rollout.sglang.io/"

OWNED_ENV_PREFIX = "ROLLOUT_"
_OWNED_ENV = {
    CONTAINER_AGENT: frozenset({"PYTHONPATH"}),
    CONTAINER_ENGINE: frozenset({"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"}),
}


def owned_env(container: str, name: str) -> bool:
    """Whether the operator sets this variable in this container of its own."""
    return name.startswith(OWNED_ENV_PREFIX) or name in _OWNED_ENV.get(container, frozenset())


def merged(template: Manifest, overlay: PodOverlay, field: str) -> Manifest:
    """`template` (core/v1 PodTemplateSpec) with `overlay` laid over it; the arguments are not changed.
    field: where the overlay stands in the resource, for messages. Raises UnusableSpec."""
    written = _without_nulls(overlay.to_object())
    _refuse_misshapen(written, field)
    _refuse_owned(template, written, field)
    result: Manifest = _merge_maps(template, written)
    return result


def _without_nulls(value: Any) -> Any:
    """Null means absent, as the API server takes it; server-side apply refuses some of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value if inner is not None]
    return value


def _refuse_misshapen(value: Any, field: str) -> None:
    """Parts of an overlay are open to the API server, so a named list may hold anything."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        here = f"{field}.{name}"
        if name not in MERGE_KEYS or name == "claims":
            _refuse_misshapen(inner, here)
            continue
        keys = MERGE_KEYS[name]
        for entry in inner if isinstance(inner, list) else [None]:
            if not isinstance(entry, dict) or not _is_named(entry, keys):
                raise UnusableSpec(f"{here} must be a list of objects, each with {' and '.join(keys)} as text")
            _refuse_misshapen(entry, here)


def _is_named(entry: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    """One key must be there; of several, core/v1 lets some be absent."""
    return all(isinstance(entry.get(key, "" if len(keys) > 1 else None), str) for key in keys)


def _merge_maps(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _merge_maps(old, value)
        elif isinstance(old, list) and isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merge_lists(key, old, value)
        else:
            result[key] = value
    return result


def _merge_lists(kind: str, below: list[Any], above: list[Any]) -> list[Any]:
    """Entries of `below` in their order, then the new ones of `above` in theirs."""
    result = list(below)
    places = {_identity(kind, entry): place for place, entry in enumerate(result)}
    for entry in above:
        place = places.get(_identity(kind, entry))
        if place is None:
            places[_identity(kind, entry)] = len(result)
            result.append(entry)
        else:
            result[place] = _merge_maps(result[place], entry) if kind in _DEEP_LISTS else entry
    return result


def _identity(kind: str, entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in MERGE_KEYS[kind])


def _refuse_owned(template: Manifest, overlay: Mapping[str, Any], field: str) -> None:
    for key in overlay.get("metadata", {}).get("labels", {}):
        if key in _OWNED_LABELS or key.startswith(_OWNED_PREFIX):
            raise UnusableSpec(f"{field}.metadata.labels: {key} belongs to the operator: choose another key")
    for key in overlay.get("metadata", {}).get("annotations", {}):
        if key.startswith(_OWNED_PREFIX):
            raise UnusableSpec(f"{field}.metadata.annotations: {key} belongs to the operator: choose another key")
    spec = overlay.get("spec", {})
    for name, instead in _OWNED_POD_FIELDS.items():
        if name in spec:
            raise UnusableSpec(f"{field}.spec.{name} belongs to the operator: {instead}")
    ours = template["spec"]
    _refuse_equal_names(ours.get("volumes", ()), spec.get("volumes", ()), "name", f"{field}.spec.volumes")
    own_lists = {kind: {entry["name"]: entry for entry in ours.get(kind, ())} for kind in _DEEP_LISTS}
    own_names = {name: kind for kind, entries in own_lists.items() for name in entries}
    for kind in sorted(_DEEP_LISTS):
        for entry in spec.get(kind, ()):
            if own_names.get(entry["name"], kind) != kind:
                raise UnusableSpec(
                    f"{field}.spec.{kind}: {entry['name']} is the operator's, and is one of"
                    f" {own_names[entry['name']]}: write it there"
                )
            if entry["name"] in own_lists[kind]:
                _refuse_in_container(own_lists[kind][entry["name"]], entry, f"{field}.spec.{kind}[{entry['name']}]")


def _refuse_in_container(ours: Mapping[str, Any], theirs: Mapping[str, Any], field: str) -> None:
    for name, instead in _OWNED_CONTAINER_FIELDS.items():
        if name in theirs:
            raise UnusableSpec(f"{field}.{name} belongs to the operator: {instead}")
    for variable in theirs.get("env", ()):
        if owned_env(ours["name"], variable["name"]):
            raise UnusableSpec(f"{field}.env: {variable['name']} belongs to the operator: choose another name")
    _refuse_equal_names(
        ours.get("volumeMounts", ()), theirs.get("volumeMounts", ()), "mountPath", f"{field}.volumeMounts"
    )


def _refuse_equal_names(
    ours: Iterable[Mapping[str, Any]], theirs: Iterable[Mapping[str, Any]], key: str, field: str
) -> None:
    taken = {entry[key] for entry in ours}
    for entry in theirs:
        if entry.get(key) in taken:
            raise UnusableSpec(f"{field}: {entry[key]} belongs to the operator: choose another {key}")
