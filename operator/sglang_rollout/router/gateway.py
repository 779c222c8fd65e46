"""Starts smg in this process: `python -m sglang_rollout.router.gateway [--policy P] [smg's flags]`.

Its control key is handed over in memory, since smg takes keys on the command line only, where /proc shows them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .front import HOLD_SECONDS
from .settings import CONTROL_KEY, RouterSettings

# What smg's flags are called once parsed. A user's arguments may not change these: registration is the only gate, so
# nothing else may add workers, judge them by more than /health, send a request twice or open another way in.
OWNED = (
    "host",
    "port",
    "worker_urls",
    "dp_aware",
    "prefill_urls",
    "decode_urls",
    "encode_urls",
    "pd_disaggregation",
    "epd_disaggregation",
    "service_discovery",
    "discovery_provider",
    "discovery_file",
    "enable_mesh",
    "enable_rl",
    "enable_wasm",
    "backend",
    "api_key",
    "tenant_api_keys",
    "control_plane_api_keys",
    "jwt_issuer",
    "jwt_audience",
    "jwt_jwks_uri",
    "jwt_role_mapping",
    "server_cert_path",
    "server_key_path",
    "disable_retries",
    "retry_max_retries",
    "disable_circuit_breaker",
    "disable_health_check",
    "health_check_endpoint",
    "health_check_port",
    "health_check_interval_secs",
    "health_check_timeout_secs",
    "health_failure_threshold",
    "health_success_threshold",
    "remove_unhealthy_workers",
    "worker_startup_timeout_secs",
    "request_timeout_secs",
    "prometheus_host",
    "prometheus_port",
)


# smg 1.13 takes it only with two workers named at its start; least_load goes by the same loads.
UNUSABLE_POLICY = "power_of_two"


class UnusableArgument(ValueError):
    """smg would not start so, or it is the operator's to set."""


def defaults(drain_seconds: int | None) -> list[str]:
    """Flags before the user's, who may set them otherwise."""
    return [
        *("--log-level", "warn"),
        *("--max-concurrent-requests", "0"),  # a paused fleet holds as many requests as clients send
        *("--history-backend", "none"),
        "--disable-tokenizer-autoload",  # requests go to the engines as they are
        *(() if drain_seconds is None else ("--shutdown-grace-period-secs", str(drain_seconds))),
    ]


def owned(control_key: str, port: int, metrics_port: int) -> list[str]:
    """Flags after the user's. /health is cheap at the engines and says nothing of a pause, so it may be asked often:
    a dead engine gets no requests after a second."""
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - metrics hold no secret
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", everywhere, "--prometheus-port", str(metrics_port)),
        *("--control-plane-api-keys", f"sidecar:sidecar:admin:{control_key}"),
        *("--health-check-endpoint", "/health", "--health-check-interval-secs", "1"),
        *("--health-check-timeout-secs", "5"),
        *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
        *("--disable-retries", "--disable-circuit-breaker", "--no-remove-unhealthy-workers"),
        *("--request-timeout-secs", str(HOLD_SECONDS)),
    ]


def refuse_unusable(arguments: Sequence[str], parse: Callable[[list[str]], Any]) -> None:
    """Raises UnusableArgument. smg's own parser tells, so that abbreviations and later flags count as well."""
    asked, untouched = vars(parse(list(arguments))), vars(parse([]))
    changed = [name for name in OWNED if name in untouched and asked[name] != untouched[name]]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UnusableArgument(f"spec.router.args may not set {flags}: take it out, the operator sets it")
    if asked["policy"] == UNUSABLE_POLICY:
        raise UnusableArgument(f"smg cannot start without workers under policy {UNUSABLE_POLICY}: use least_load")


def main(arguments: Sequence[str], settings: RouterSettings) -> None:
    from smg.launch_router import launch_router, parse_router_args

    refuse_unusable(arguments, parse_router_args)
    control_key = (settings.run_dir / CONTROL_KEY).read_text()
    last = owned(control_key, settings.gateway_port, settings.metrics_port)
    launch_router(parse_router_args([*defaults(settings.drain_seconds), *arguments, *last]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:], RouterSettings.from_environment(os.environ))
    except UnusableArgument as error:
        sys.exit(str(error))
