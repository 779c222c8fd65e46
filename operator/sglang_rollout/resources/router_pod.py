"""The pod template of the router: smg, and the sidecar that keeps its workers what the operator wants."""

from __future__ import annotations

from ..api import SGLangRollout
from ..api.names import (
    CONTAINER_ROUTER,
    CONTAINER_SIDECAR,
    LABEL_COMPONENT,
    LABEL_FLEET,
    fleet_config_name,
    router_labels,
    router_service_account_name,
)
from ..protocol.pod import (
    ENV_ROUTER_API_KEY_FILE,
    FLEET_DIR,
    PATH_LIVE,
    PATH_READY,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    ROUTER_SIDECAR_PORT,
    RUN_DIR,
)
from .context import FleetContext
from .environment import literal, pod_identity
from .identity import Manifest
from .overlay import merged
from .pod_parts import http_probe, lost_node_tolerations, port, with_drain_seconds
from .security import RESTRICTED_CONTAINER, RESTRICTED_POD

GRACE_SECONDS = 60
# What smg's own exit may take after its drain.
KILL_SECONDS = 10

RUN_SIZE = "16Mi"
SIDECAR_REQUESTS = {"cpu": "50m", "memory": "96Mi"}
ROUTER_REQUESTS = {"cpu": "100m", "memory": "256Mi"}

_VOLUME_RUN = "rollout-run"
_VOLUME_FLEET = "rollout-fleet"
_VOLUME_TMP = "rollout-tmp"
_VOLUME_KEY = "rollout-client-key"
_KEY_DIR = "/etc/sglang-rollout-client"
_KEY_FILE = "api-key"


def router_pod_template(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    """core/v1 PodTemplateSpec of the router. Raises UnusableSpec."""
    template: Manifest = {
        "metadata": {
            "labels": router_labels(rollout.metadata.name),
            "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER_ROUTER},
        },
        "spec": {
            "serviceAccountName": router_service_account_name(rollout.metadata.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": RESTRICTED_POD,
            "tolerations": lost_node_tolerations(),
            "topologySpreadConstraints": [_spread(rollout)],
            "volumes": _volumes(rollout),
            "initContainers": [_sidecar(rollout, context)],
            "containers": [_router(rollout, context)],
        },
    }
    template = merged(template, rollout.spec.router.template, "router.template")
    return with_drain_seconds(template, {CONTAINER_ROUTER}, KILL_SECONDS)


def _sidecar(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    return {
        "name": CONTAINER_SIDECAR,
        "image": _image(rollout, context),
        "restartPolicy": "Always",
        "command": ["python3", "-m", "sglang_rollout.router"],
        "ports": [port("sidecar", ROUTER_SIDECAR_PORT)],
        "env": pod_identity(rollout),
        "resources": {"requests": SIDECAR_REQUESTS},
        "securityContext": RESTRICTED_CONTAINER,
        "startupProbe": http_probe(PATH_LIVE, "sidecar", period=1, failures=120),
        "readinessProbe": http_probe(PATH_READY, "sidecar", period=1, failures=2),
        "livenessProbe": http_probe(PATH_LIVE, "sidecar", period=10, failures=6),
        "volumeMounts": [
            *_shared_mounts(),
            {"name": _VOLUME_FLEET, "mountPath": FLEET_DIR, "readOnly": True},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _router(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    """Its readiness is the sidecar's, which knows whether it is up and has its workers. On SIGTERM smg itself waits
    for the Service to forget it, then for the requests that run: no preStop hook."""
    router = rollout.spec.router
    mounts = _shared_mounts()
    environment = pod_identity(rollout)
    if router.auth is not None:
        mounts.append({"name": _VOLUME_KEY, "mountPath": _KEY_DIR, "readOnly": True})
        environment.append(literal(ENV_ROUTER_API_KEY_FILE, f"{_KEY_DIR}/{_KEY_FILE}"))
    return {
        "name": CONTAINER_ROUTER,
        "image": _image(rollout, context),
        "command": ["python3", "-m", "sglang_rollout.router.launch"],
        "args": [f"--policy={router.policy}", *router.args],
        "ports": [port("http", ROUTER_PORT), port("metrics", ROUTER_METRICS_PORT)],
        "env": environment,
        "resources": router.resources.to_object() or {"requests": ROUTER_REQUESTS},
        "securityContext": RESTRICTED_CONTAINER,
        "livenessProbe": http_probe("/liveness", "http", period=10, failures=6),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _image(rollout: SGLangRollout, context: FleetContext) -> str:
    return rollout.spec.router.image or context.router_image


def _shared_mounts() -> list[Manifest]:
    return [
        {"name": _VOLUME_RUN, "mountPath": RUN_DIR},
        {"name": _VOLUME_TMP, "mountPath": "/tmp"},  # noqa: S108
    ]


def _volumes(rollout: SGLangRollout) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": _VOLUME_RUN, "emptyDir": {"medium": "Memory", "sizeLimit": RUN_SIZE}},
        {"name": _VOLUME_FLEET, "configMap": {"name": fleet_config_name(rollout.metadata.name)}},
        {"name": _VOLUME_TMP, "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    if rollout.spec.router.auth is not None:
        reference = rollout.spec.router.auth.secret_key_ref
        secret = {
            "secretName": reference.name,
            "defaultMode": 0o440,
            "items": [{"key": reference.key, "path": _KEY_FILE}],
        }
        volumes.append({"name": _VOLUME_KEY, "secret": secret})
    return volumes


def _spread(rollout: SGLangRollout) -> Manifest:
    labels = router_labels(rollout.metadata.name)
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {key: labels[key] for key in (LABEL_FLEET, LABEL_COMPONENT)}},
    }
