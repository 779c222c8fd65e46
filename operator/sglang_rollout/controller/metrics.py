"""The operator's Prometheus series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .kinds import Object

PREFIX = "sglang_rollout"
FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Metrics:
    """All series in one registry, so that tests can have their own. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = FAST) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, registry=self.registry, buckets=buckets)

        self.reconciles = counter("reconcile", "Passes over a fleet.", "result")
        self.reconcile_seconds = histogram("reconcile_seconds", "Time of one pass over a fleet.")
        self.event_to_reconcile = histogram(
            "event_to_reconcile_seconds", "From a spec's change being received to the beginning of its pass."
        )
        self.spec_to_effect = histogram(
            "spec_to_effect_seconds",
            "From a spec's change being received to the fleet being Ready at it.",
            "what",
            buckets=SLOW,
        )
        self.queue_depth = gauge("queue_depth", "Fleets that wait for a pass.")
        self.queue_latency = histogram("queue_latency_seconds", "How long fleets waited for a pass.")
        self.agent_calls = histogram("agent_call_seconds", "Calls to agents and router sidecars.", "op", "code")
        self.kube_requests = counter("kube_requests", "Calls to the Kubernetes API.", "verb", "resource", "code")
        self.kube_seconds = histogram("kube_request_seconds", "Calls to the Kubernetes API.", "verb")
        self.watch_age = gauge(
            "watch_last_event_age_seconds", "Since a watch last heard of the API server.", "resource", "namespace"
        )
        self.resync_missed = counter("resync_missed", "Changes of resources that the watch had not told.")
        self.leader = gauge("leader", "1 while this replica leads.")
        self.loop_lag = gauge("loop_lag_seconds", "How late the event loop ran a timer.")
        self.fleets = {
            name: gauge(f"fleet_{name}", text, "namespace", "fleet")
            for name, text in (
                ("engines", "Engines that exist."),
                ("ready", "Engines whose every pod is Ready."),
                ("routable", "Engines in the router, at an allowed version."),
                ("paused", "Engines that are paused."),
                ("restarts", "Restarts of engines that count against the budget."),
                ("behind_target", "Engines that do not serve the target version."),
                ("weights_epoch", "Membership epoch of the weights."),
            )
        }

    def kube_call(self, verb: str, resource: str, code: str, seconds: float) -> None:
        self.kube_requests.labels(verb, resource, code).inc()
        if verb != "watch":
            self.kube_seconds.labels(verb).observe(seconds)

    def agent_call(self, operation: str, code: str, seconds: float) -> None:
        self.agent_calls.labels(operation, code).observe(seconds)

    def fleet_status(self, namespace: str, fleet: str, status: Object) -> None:
        """The gauges of one fleet, from its status."""
        engines = status.get("engines") or []
        weights = status.get("weights") or {}
        target = weights.get("targetVersion", "")
        values = {
            "engines": status.get("replicas", 0),
            "ready": status.get("readyReplicas", 0),
            "routable": status.get("routableReplicas", 0),
            "paused": sum(1 for engine in engines if engine.get("paused")),
            "restarts": sum(engine.get("restarts", 0) for engine in engines),
            "behind_target": sum(1 for engine in engines if engine.get("weightVersion", "") != target),
            "weights_epoch": weights.get("epoch", 0),
        }
        for name, value in values.items():
            self.fleets[name].labels(namespace, fleet).set(value)

    def forget_fleet(self, namespace: str, fleet: str) -> None:
        for gauge in self.fleets.values():
            try:
                gauge.remove(namespace, fleet)
            except KeyError:  # it never had a status
                return
