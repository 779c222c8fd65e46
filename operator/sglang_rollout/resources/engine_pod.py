"""The pod template of an engine: agent and launcher are brought into the engine's own image by a volume, and
nothing in it changes when weights move."""

from __future__ import annotations

from kubernetes.utils.quantity import parse_quantity

from ..api import SGLangRollout
from ..api.names import (
    CONTAINER_AGENT,
    CONTAINER_ENGINE,
    CONTAINER_INJECT,
    engine_labels,
    engine_name,
    engine_service_account_name,
    fleet_config_name,
)
from ..protocol.pod import (
    AGENT_PORT,
    ENGINE_PORT,
    ENV_AGENT_PORT,
    ENV_ENGINE,
    ENV_ENGINE_PORT,
    ENV_NODES,
    ENV_RENDEZVOUS_PORT,
    ENV_SERVED_NAME,
    ENV_STAGE_BUCKET_BYTES,
    ENV_STAGE_MEDIUM,
    ENV_STAGE_VERSIONS,
    ENV_STARTUP_TIMEOUT,
    FLEET_DIR,
    PATH_LIVE,
    PATH_READY,
    PAYLOAD_DIR,
    PROFILE_DIR,
    RENDEZVOUS_PORT,
    RUN_DIR,
    SITE_DIR,
    STATE_DIR,
)
from .context import FleetContext
from .environment import literal, pod_identity, rank
from .identity import Manifest
from .overlay import UnusableSpec, merged, owned_env
from .pod_parts import http_probe, lost_node_tolerations, port, with_drain_seconds
from .security import RESTRICTED_CONTAINER, UNPRIVILEGED_CONTAINER, UNPRIVILEGED_POD

GRACE_SECONDS = 60
# What a kill of the engine's processes and the end of the sidecars may take of the grace period.
KILL_SECONDS = 15

PAYLOAD_SIZE = "256Mi"
RUN_SIZE = "16Mi"
STATE_SIZE = "64Mi"  # in memory: paused engines wait for it, and what it tells of ends with the machine
PROFILE_SIZE = "16Gi"  # traces of a few steps; more than this evicts the pod
ENV_KEEP_ALIVE = "SGLANG_TIMEOUT_KEEP_ALIVE"
KEEP_ALIVE_SECONDS = 600
AGENT_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
INJECT_REQUESTS = {"cpu": "50m", "memory": "64Mi"}

_VOLUME_PAYLOAD = "rollout-payload"
_VOLUME_RUN = "rollout-run"
_VOLUME_STATE = "rollout-state"
_VOLUME_FLEET = "rollout-fleet"
_VOLUME_SHM = "rollout-shm"
_VOLUME_PROFILES = "rollout-profiles"
_VOLUME_MODEL = "rollout-model"

_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
    "kubectl.kubernetes.io/default-container": CONTAINER_ENGINE,
}


def engine_pod_template(rollout: SGLangRollout, context: FleetContext, index: int) -> Manifest:
    """core/v1 PodTemplateSpec of engine `index`. Raises UnusableSpec."""
    spec = rollout.spec
    template: Manifest = {
        "metadata": {"labels": engine_labels(rollout.metadata.name, index), "annotations": dict(_ANNOTATIONS)},
        "spec": {
            "serviceAccountName": engine_service_account_name(rollout.metadata.name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": UNPRIVILEGED_POD,
            "tolerations": lost_node_tolerations(),
            "volumes": _volumes(rollout),
            "initContainers": [_inject(rollout, context), _agent(rollout, index)],
            "containers": [_engine(rollout, index)],
        },
    }
    if spec.agent.gpu_access.type != "None":
        # CUDA IPC opens memory of a process that it must be able to see.
        template["spec"]["shareProcessNamespace"] = True
    if spec.network.host_network:
        template["spec"] |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if spec.scheduling.scheduler_name:
        template["spec"]["schedulerName"] = spec.scheduling.scheduler_name
    template = merged(template, spec.engine.template, "engine.template")
    return with_drain_seconds(template, {CONTAINER_AGENT, CONTAINER_ENGINE}, KILL_SECONDS)


def engine_arguments(rollout: SGLangRollout) -> list[str]:
    """SGLang's flags that follow from the resource alone; the launcher adds what is known only in the pod."""
    engine = rollout.spec.engine
    arguments = [f"--tp-size={engine.tensor_parallel_size}"]
    for flag, value in (
        ("--pp-size", engine.pipeline_parallel_size),
        ("--dp-size", engine.data_parallel_size),
        ("--ep-size", engine.expert_parallel_size),
    ):
        if value > 1:
            arguments.append(f"{flag}={value}")
    return [*arguments, *engine.args]


def _inject(rollout: SGLangRollout, context: FleetContext) -> Manifest:
    return {
        "name": CONTAINER_INJECT,
        "image": rollout.spec.agent.image or context.agent_image,
        "securityContext": RESTRICTED_CONTAINER,
        "resources": {"requests": INJECT_REQUESTS},
        "volumeMounts": [{"name": _VOLUME_PAYLOAD, "mountPath": PAYLOAD_DIR}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _agent(rollout: SGLangRollout, index: int) -> Manifest:
    """The sidecar. It runs in the engine's image, for the engine's own torch and CUDA."""
    on_gpu = rollout.spec.agent.staging.medium == "Device"
    return {
        "name": CONTAINER_AGENT,
        "image": rollout.spec.engine.image,
        "restartPolicy": "Always",
        # A process beside the agent holds a stage in GPU memory; it must outlive an agent that crashes.
        "command": ["python3", "-m", f"sglang_rollout.agent{'.supervisor' if on_gpu else ''}"],
        "ports": [port("agent", AGENT_PORT)],
        "env": [
            literal("PYTHONPATH", SITE_DIR),
            *_gpu_environment(rollout),
            *_shared_environment(rollout, index),
        ],
        "resources": _agent_resources(rollout),
        "securityContext": UNPRIVILEGED_CONTAINER,
        "startupProbe": http_probe(PATH_LIVE, "agent", period=1, failures=120),
        "readinessProbe": http_probe(PATH_READY, "agent", period=1, failures=2),
        "livenessProbe": http_probe(PATH_LIVE, "agent", period=10, failures=6),
        "volumeMounts": [
            *_shared_mounts(rollout),
            {"name": _VOLUME_STATE, "mountPath": STATE_DIR},
            {"name": _VOLUME_FLEET, "mountPath": FLEET_DIR, "readOnly": True},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _engine(rollout: SGLangRollout, index: int) -> Manifest:
    """No probes: the agent judges the engine. Its preStop hook holds back the SIGTERM while requests finish; the
    sidecar's would not, as the kubelet runs the hooks of all containers at once."""
    drain = ["/usr/bin/env", f"PYTHONPATH={SITE_DIR}", "python3", "-m", "sglang_rollout.agent.drain"]
    return {
        "name": CONTAINER_ENGINE,
        "image": rollout.spec.engine.image,
        "command": ["python3", f"{SITE_DIR}/sglang_rollout/engine/launcher.py", "--"],
        "args": engine_arguments(rollout),
        "ports": [port("http", ENGINE_PORT)],
        "env": [
            *_user_environment(rollout),
            *_kept_connections(rollout),
            # /health answers without generating, so a router's look at a paused engine costs nothing.
            literal("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false"),
            *_shared_environment(rollout, index),
        ],
        "resources": rollout.spec.engine.resources.to_object(),
        "securityContext": UNPRIVILEGED_CONTAINER,
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
        "volumeMounts": _shared_mounts(rollout),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _user_environment(rollout: SGLangRollout) -> list[Manifest]:
    for variable in rollout.spec.engine.env:
        if owned_env(CONTAINER_ENGINE, variable.name):
            raise UnusableSpec(f"engine.env: {variable.name} belongs to the operator: choose another name")
    return [variable.to_object() for variable in rollout.spec.engine.env]


def _kept_connections(rollout: SGLangRollout) -> list[Manifest]:
    """SGLang closes a connection after five idle seconds, while the router and the agent may be about to use it again:
    a request that is lost so cannot be repeated. With this it is they who close it."""
    if any(variable.name == ENV_KEEP_ALIVE for variable in rollout.spec.engine.env):
        return []
    return [literal(ENV_KEEP_ALIVE, KEEP_ALIVE_SECONDS)]


def _shared_environment(rollout: SGLangRollout, index: int) -> list[Manifest]:
    spec = rollout.spec
    return [
        *pod_identity(rollout),
        literal(ENV_ENGINE, engine_name(rollout.metadata.name, index)),
        rank(),
        literal(ENV_NODES, spec.engine.nodes),
        literal(ENV_ENGINE_PORT, ENGINE_PORT),
        literal(ENV_AGENT_PORT, AGENT_PORT),
        literal(ENV_RENDEZVOUS_PORT, RENDEZVOUS_PORT),
        literal(ENV_STARTUP_TIMEOUT, spec.engine.startup_timeout_seconds),
        literal(ENV_SERVED_NAME, spec.model.served_name or spec.model.path),
        literal(ENV_STAGE_MEDIUM, spec.agent.staging.medium),
        literal(ENV_STAGE_VERSIONS, spec.agent.staging.versions),
        literal(ENV_STAGE_BUCKET_BYTES, _bytes(spec.agent.staging.bucket_size)),
    ]


def _gpu_environment(rollout: SGLangRollout) -> list[Manifest]:
    """Images made for GPUs ask for all of them in their environment: right for an agent beside an engine that has the
    whole node, and wrong for one that needs none. A resource claim brings its devices by itself."""
    match rollout.spec.agent.gpu_access.type:
        case "VisibleDevices":
            return [literal("NVIDIA_VISIBLE_DEVICES", "all")]
        case "ResourceClaim":
            return []
        case _:
            return [literal("NVIDIA_VISIBLE_DEVICES", "void")]


def _agent_resources(rollout: SGLangRollout) -> Manifest:
    """What the user wrote, whole: a request of ours beside a limit of theirs may contradict it."""
    written: Manifest = rollout.spec.agent.resources.to_object()
    return written or {"requests": AGENT_REQUESTS}


def _shared_mounts(rollout: SGLangRollout) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": _VOLUME_PAYLOAD, "mountPath": PAYLOAD_DIR, "readOnly": True},
        {"name": _VOLUME_RUN, "mountPath": RUN_DIR},
        {"name": _VOLUME_SHM, "mountPath": "/dev/shm"},  # noqa: S108
        {"name": _VOLUME_PROFILES, "mountPath": PROFILE_DIR},
    ]
    if rollout.spec.model.volume is not None:
        mounts.append({"name": _VOLUME_MODEL, "mountPath": rollout.spec.model.mount_path, "readOnly": True})
    return mounts


def _volumes(rollout: SGLangRollout) -> list[Manifest]:
    shm = rollout.spec.engine.shared_memory_size
    volumes: list[Manifest] = [
        {"name": _VOLUME_PAYLOAD, "emptyDir": {"sizeLimit": PAYLOAD_SIZE}},
        {"name": _VOLUME_RUN, "emptyDir": {"medium": "Memory", "sizeLimit": RUN_SIZE}},
        {"name": _VOLUME_STATE, "emptyDir": {"medium": "Memory", "sizeLimit": STATE_SIZE}},
        {"name": _VOLUME_FLEET, "configMap": {"name": fleet_config_name(rollout.metadata.name)}},
        {"name": _VOLUME_PROFILES, "emptyDir": {"sizeLimit": PROFILE_SIZE}},
        {"name": _VOLUME_SHM, "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
    ]
    if rollout.spec.model.volume is not None:
        volumes.append({**rollout.spec.model.volume, "name": _VOLUME_MODEL})
    return volumes


def _bytes(quantity: int | str) -> int:
    """Raises UnusableSpec for what is no whole number of bytes above zero."""
    try:
        size = int(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UnusableSpec(f"agent.staging.bucketSize: {error}") from error
    if size < 1:
        raise UnusableSpec(f"agent.staging.bucketSize: {quantity} is no size, write 512Mi for example")
    return size
