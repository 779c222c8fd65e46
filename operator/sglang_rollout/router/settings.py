"""What the programs in a router's pod are told by their environment, and the files in which they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_rollout.protocol import pod

# In RUN_DIR.
CONTROL_KEY = "router-control.key"  # what the router's worker API asks for; made by the sidecar
DESIRED = "router-desired.json"  # the protocol.routing.RouterDesired last accepted, engines' keys included
LEASE_TERM = "router-lease-term"

FRONT_CONFIGURATION = "router-front.cfg"
FRONT_KEYS = "router-front.keys"  # digests of the clients' keys

# smg itself, on the loopback only; clients meet the front on pod.ROUTER_PORT.
GATEWAY_PORT = 30003

# For runs outside a pod (development, tests): other ports.
ENV_ROUTER_PORT = "ROLLOUT_ROUTER_PORT"
ENV_SIDECAR_PORT = "ROLLOUT_ROUTER_SIDECAR_PORT"
ENV_GATEWAY_PORT = "ROLLOUT_GATEWAY_PORT"
ENV_METRICS_PORT = "ROLLOUT_METRICS_PORT"


@dataclass(frozen=True)
class SidecarSettings:
    pod_uid: str
    run_dir: Path
    fleet_file: Path
    gateway_url: str = f"http://127.0.0.1:{GATEWAY_PORT}"
    host: str | None = None  # all addresses, of both families
    port: int = pod.ROUTER_SIDECAR_PORT

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> SidecarSettings:
        return cls(
            pod_uid=env[pod.ENV_POD_UID],
            run_dir=run_dir(env),
            fleet_file=Path(env.get(pod.ENV_FLEET_DIR, pod.FLEET_DIR)) / pod.FLEET_FILE,
            gateway_url=f"http://127.0.0.1:{env.get(ENV_GATEWAY_PORT, GATEWAY_PORT)}",
            port=int(env.get(ENV_SIDECAR_PORT, pod.ROUTER_SIDECAR_PORT)),
        )


@dataclass(frozen=True)
class RouterSettings:
    """client_keys: file with the keys that clients present, one a line; None: everyone is served.
    drain_seconds: how long running requests may go on once the pod is told to stop; None: smg's own default."""

    run_dir: Path
    client_keys: Path | None
    drain_seconds: int | None
    port: int = pod.ROUTER_PORT
    gateway_port: int = GATEWAY_PORT
    metrics_port: int = pod.ROUTER_METRICS_PORT

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> RouterSettings:
        client_keys, drain = env.get(pod.ENV_ROUTER_API_KEY_FILE), env.get(pod.ENV_DRAIN_SECONDS)
        return cls(
            run_dir=run_dir(env),
            client_keys=Path(client_keys) if client_keys else None,
            drain_seconds=int(float(drain)) if drain else None,
            port=int(env.get(ENV_ROUTER_PORT, pod.ROUTER_PORT)),
            gateway_port=int(env.get(ENV_GATEWAY_PORT, GATEWAY_PORT)),
            metrics_port=int(env.get(ENV_METRICS_PORT, pod.ROUTER_METRICS_PORT)),
        )


def run_dir(env: Mapping[str, str]) -> Path:
    return Path(env.get(pod.ENV_RUN_DIR, pod.RUN_DIR))
