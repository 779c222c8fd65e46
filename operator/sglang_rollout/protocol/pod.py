"""The inside of our pods: ports, folders, files, sockets and environment that the manifests set up and the
programs in the pods rely on."""

from __future__ import annotations

# Ports. Engine pods:
ENGINE_PORT = 30000  # SGLang's HTTP server, on rank 0
AGENT_PORT = 30001
RENDEZVOUS_PORT = 30010  # torch's rendezvous of a multi-node engine (--dist-init-addr), on rank 0
# Router pods:
ROUTER_PORT = 30000
ROUTER_SIDECAR_PORT = 30002
ROUTER_METRICS_PORT = 29000

# Folders in engine pods.
PAYLOAD_DIR = "/sglang-rollout"  # emptyDir, filled by the `inject` init container from the agent image
SITE_DIR = f"{PAYLOAD_DIR}/site"  # on PYTHONPATH of agent and launcher
RUN_DIR = "/run/sglang-rollout"  # emptyDir in memory: keys and sockets; outlives a container, not the pod
STATE_DIR = "/var/lib/sglang-rollout"  # emptyDir in memory: what an agent must remember over its own restart
PROFILE_DIR = "/var/lib/sglang-rollout-profiles"  # emptyDir of agent and engine: traces, a folder for each profile
FLEET_DIR = "/etc/sglang-rollout"  # the fleet's ConfigMap, mounted read-only
FLEET_FILE = "fleet.json"  # a protocol.fleet.FleetConfig, both as the ConfigMap's key and as the file's name

# Sockets and files in RUN_DIR.
AGENT_SOCKET = "agent.sock"  # HTTP over a Unix socket: the launcher asks its agent when and what to start
LAUNCHER_SOCKET = "launcher.sock"  # HTTP over a Unix socket: the agent asks the launcher to kill the engine
ENGINE_RECORD = "engine.json"  # a protocol.launch.EngineRecord, keys included; mode 0600

# Environment set by the manifests.
ENV_NAMESPACE = "ROLLOUT_NAMESPACE"
ENV_FLEET = "ROLLOUT_FLEET"  # the resource's name
ENV_ENGINE = "ROLLOUT_ENGINE"  # the engine's name, <fleet>-e<index>
ENV_RANK = "ROLLOUT_RANK"  # the pod's index in its engine
ENV_NODES = "ROLLOUT_NODES"  # pods of this engine
ENV_POD_NAME = "ROLLOUT_POD_NAME"
ENV_POD_UID = "ROLLOUT_POD_UID"
ENV_POD_IP = "ROLLOUT_POD_IP"
ENV_ENGINE_PORT = "ROLLOUT_ENGINE_PORT"
ENV_AGENT_PORT = "ROLLOUT_AGENT_PORT"
ENV_RENDEZVOUS_PORT = "ROLLOUT_RENDEZVOUS_PORT"
ENV_STARTUP_TIMEOUT = "ROLLOUT_STARTUP_TIMEOUT_SECONDS"
ENV_SERVED_NAME = "ROLLOUT_SERVED_NAME"  # what clients call the model; constant over weight updates
ENV_DRAIN_SECONDS = "ROLLOUT_DRAIN_SECONDS"  # how long preStop lets running requests finish
ENV_STAGE_MEDIUM = "ROLLOUT_STAGE_MEDIUM"  # Host or Device; None or unset: weights are not staged
ENV_STAGE_VERSIONS = "ROLLOUT_STAGE_VERSIONS"  # how many versions the stage has room for, 1 or 2
ENV_STAGE_BUCKET_BYTES = "ROLLOUT_STAGE_BUCKET_BYTES"
ENV_STAGE_GPUS = "ROLLOUT_STAGE_GPUS"  # "0,1": which of the GPUs that the agent sees a Device stage is on; unset: all

# Router pods only: the file with the key that clients must present; unset: everyone is served.
ENV_ROUTER_API_KEY_FILE = "ROLLOUT_ROUTER_API_KEY_FILE"

# For runs outside a pod (development, tests): other folders than the above.
ENV_RUN_DIR = "ROLLOUT_RUN_DIR"
ENV_STATE_DIR = "ROLLOUT_STATE_DIR"
ENV_FLEET_DIR = "ROLLOUT_FLEET_DIR"
ENV_PROFILE_DIR = "ROLLOUT_PROFILE_DIR"
ENV_TORCH_PYTHON = "ROLLOUT_TORCH_PYTHON"  # an interpreter with torch, where the agent's own has none
ENV_TERMINATION_LOG = "ROLLOUT_TERMINATION_LOG"

# HTTP paths.
PATH_LIVE = "/livez"  # the process answers; never waits for the engine
PATH_READY = "/readyz"  # agent: its engine serves (paused counts as serving); sidecar: router in step once
PATH_IDENTITY = "/v1/identity"  # open: protocol.report.AgentIdentity, for the agents of the same engine
PATH_DESIRED = "/v1/desired"  # PUT protocol.desired.AgentDesired (sidecar: routing.RouterDesired) -> report
PATH_REPORT = "/v1/report"  # GET ?after=<revision>&wait=<seconds> -> protocol.report.AgentReport (RouterReport)
PATH_ENGINE = "/v1/engine"  # /v1/engine/<route>: the engine's own route, for trainers under control: External
PATH_STAGE = "/v1/stage"  # /v1/stage/<root>/...: reads of the stage, for agents that show AgentDesired.peer_key
PATH_DRAIN = "/v1/drain"  # POST, only on the agent's Unix socket: preStop
PATH_LAUNCH = "/v1/launch"  # POST on the agent's Unix socket, held until the engine may start: launch.LaunchOrder
PATH_START = "/v1/start"  # GET on the launcher's Unix socket: {"startId"} of the engine that it looks after
PATH_KILL = "/v1/kill"  # POST launch.KillOrder on the launcher's Unix socket

# On every call of the operator: the UID of the pod that it means. A pod with another UID answers 421 and does nothing:
# its address may have been the meant one's a moment ago.
QUERY_POD = "pod"

# Errors answer with a JSON body {"error": "<sentence>"}.
# 401: no or bad token. 403: a caller that is not allowed. 409: a lease term lower than one seen.


def address_of(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
