"""Command-line flags that belong to the operator, and how argparse could still be talked into them."""

from __future__ import annotations

from dataclasses import dataclass

from .cel import string_list
from .schema import Rule


@dataclass(frozen=True)
class OwnedFlags:
    """Flags of a program with an argparse command line.

    by_field: the flags, aliases included, by the field of the resource to write instead ("": none).

    argparse takes any unique prefix of a long flag. Every prefix of an owned flag is refused, unique or not: argparse
    would read it as the owned flag or fail on it as ambiguous, and which of the two depends on the release. No flag
    of the supported releases is itself a prefix of an owned one; a test keeps this true.
    """

    by_field: dict[str, tuple[str, ...]]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for flags in self.by_field.values() for flag in flags)

    def owner_of(self, argument: str) -> str | None:
        """The owned flag that `argument` sets or abbreviates (--flag, --flag=value, "--flag value"), or None.
        Of several that it may abbreviate, the shortest."""
        name = argument.split("=")[0].split(" ")[0]
        if not name.startswith("--"):
            return None
        return min((flag for flag in self.flags if flag.startswith(name)), key=len, default=None)

    def rule(self, rule_id: str) -> Rule:
        """`owner_of` in CEL, for one argument; the one-element list binds the name once."""
        fields = ", ".join(field for field in self.by_field if field)
        return Rule(
            rule_id,
            "[self.split('=')[0].split(' ')[0]].all(name, !name.startsWith('--')"
            f" || !{string_list(self.flags)}.exists(flag, flag.startsWith(name)))",
            f"this flag, or the beginning of one, belongs to the operator: use {fields} instead, and write other"
            " flags in full; addresses, ports, keys and TLS cannot be set",
        )


# SGLang 0.5.23 (srt/arg_groups/fields).
ENGINE_FLAGS = OwnedFlags(
    {
        "model.path": ("--model-path", "--model", "--config"),
        "model.servedName": ("--served-model-name",),
        "engine.nodes": ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
        "engine.tensorParallelSize": ("--tp-size", "--tensor-parallel-size"),
        "engine.pipelineParallelSize": ("--pp-size", "--pipeline-parallel-size"),
        "engine.dataParallelSize": (
            "--dp-size",
            "--data-parallel-size",
            "--attn-dp-size",
            "--attention-data-parallel-size",
        ),
        "engine.expertParallelSize": ("--ep-size", "--expert-parallel-size", "--ep"),
        "weights.version": ("--weight-version",),
        "memory": ("--enable-memory-saver", "--enable-weights-cpu-backup", "--custom-weight-loader"),
        "": (
            "--host",
            "--port",
            "--api-key",
            "--admin-api-key",
            "--tokenizer-worker-num",
            "--grpc-mode",
            "--smg-grpc-mode",
            "--ssl-keyfile",
            "--ssl-certfile",
            "--ssl-ca-certs",
            "--ssl-keyfile-password",
        ),
    }
)

# smg 1.13.0 (smg launch). Registration is the only gate: nothing else may add workers, judge their health or send
# a request twice.
ROUTER_FLAGS = OwnedFlags(
    {
        "router.policy": ("--policy",),
        "router.auth": ("--api-key", "--tenant-api-key"),
        "": (
            "--host",
            "--port",
            "--worker-urls",
            "--prefill",
            "--decode",
            "--encode",
            "--pd-disaggregation",
            "--epd-disaggregation",
            "--service-discovery",
            "--discovery-provider",
            "--discovery-file",
            "--enable-mesh",
            "--enable-rl",
            "--enable-wasm",
            "--dp-aware",
            "--backend",
            "--control-plane-api-keys",
            "--jwt-issuer",
            "--jwt-audience",
            "--jwt-jwks-uri",
            "--jwt-role-mapping",
            "--tls-cert-path",
            "--tls-key-path",
            "--disable-retries",
            "--retry-max-retries",
            "--disable-circuit-breaker",
            "--disable-health-check",
            "--health-check-endpoint",
            "--health-check-port",
            "--health-check-interval-secs",
            "--health-check-timeout-secs",
            "--health-failure-threshold",
            "--health-success-threshold",
            "--remove-unhealthy-workers",
            "--worker-auto-recovery",
            "--no-worker-auto-recovery",
            "--no-remove-unhealthy-workers",
            "--worker-startup-timeout-secs",
            "--request-timeout-secs",
            "--prometheus-host",
            "--prometheus-port",
        ),
    }
)
