"""What the operator's process is told by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


class SettingsError(ValueError):
    """An environment variable that is missing or cannot be read."""


@dataclass(frozen=True)
class Settings:
    """namespace, pod_name, service_account: of the operator itself.

    pod_labels: of the operator's pods, for NetworkPolicies; empty: any pod of its namespace.
    watch_namespaces: empty: all.
    metrics_port: one port for /metrics, /livez and /readyz.
    credentials_dir: where the credentials of routers that we do not run are mounted: <namespace>/<name>.
    """

    namespace: str
    pod_name: str
    service_account: str
    agent_image: str
    router_image: str
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    watch_namespaces: tuple[str, ...] = ()
    metrics_port: int = 8080
    lease_name: str = "sglang-rollout"
    log_level: str = "INFO"
    workers: int = 32
    resync_seconds: float = 300.0
    credentials_dir: str = "/etc/sglang-rollout/router-credentials"


def _number(environment: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = environment.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        raise SettingsError(f"{name} must be a number, not {text!r}") from None
    if value < least:
        raise SettingsError(f"{name} must be at least {least:g}, not {text}")
    return value


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise SettingsError(f"{name} must be set; the Helm chart does so")
    return value


def _labels(environment: Mapping[str, str], name: str) -> dict[str, str]:
    pairs = [pair.strip() for pair in environment.get(name, "").split(",") if pair.strip()]
    labels = dict(pair.partition("=")[::2] for pair in pairs)
    if not all(labels.values()):
        raise SettingsError(f"{name} must be label=value pairs with commas between, not {environment[name]!r}")
    return labels


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises SettingsError, which names the variable and what it must hold."""
    namespaces = environment.get("WATCH_NAMESPACES", "").replace(",", " ").split()
    level = environment.get("LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingsError(f"LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, not {level!r}")
    return Settings(
        namespace=_required(environment, "OPERATOR_NAMESPACE"),
        pod_name=_required(environment, "POD_NAME"),
        service_account=_required(environment, "OPERATOR_SERVICE_ACCOUNT"),
        agent_image=_required(environment, "AGENT_IMAGE"),
        router_image=_required(environment, "ROUTER_IMAGE"),
        pod_labels=_labels(environment, "OPERATOR_POD_LABELS"),
        watch_namespaces=tuple(sorted(set(namespaces))),
        metrics_port=int(_number(environment, "METRICS_PORT", 8080, 0)),
        lease_name=environment.get("LEASE_NAME", "").strip() or "sglang-rollout",
        log_level=level,
        workers=int(_number(environment, "WORKERS", 32, 1)),
        resync_seconds=_number(environment, "RESYNC_SECONDS", 300.0, 10.0),
        credentials_dir=environment.get("ROUTER_CREDENTIALS_DIR", "").strip()
        or "/etc/sglang-rollout/router-credentials",
    )
