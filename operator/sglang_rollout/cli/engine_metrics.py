"""What an engine does at the moment, from its Prometheus metrics (SGLang 0.5.23,
srt/observability/metrics_collector.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from ..api.schema import ApiModel


class EngineLoad(ApiModel):
    """running, queued, paused: requests. tokens_per_second: generated. kv_use, cache_hit_rate: 0 to 1. None: the
    engine does not tell."""

    running: int | None = None
    queued: int | None = None
    paused: int | None = None
    tokens_per_second: float | None = None
    kv_use: float | None = None
    cache_hit_rate: float | None = None


def parse_load(text: str) -> EngineLoad:
    """From the text of /metrics. Raises ValueError when it is no Prometheus text."""
    series: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # With priorities there is one more series for each; the one without is their sum.
            if not sample.labels.get("priority"):
                series[sample.name][sample.labels.get("dp_rank", "")].append(sample.value)

    def over_replicas(name: str, combine: Callable[[Iterable[float]], float]) -> float | None:
        """Data-parallel replicas are combined; tensor-parallel ranks tell the same and count once."""
        by_replica = series.get(name)
        return combine([max(values) for values in by_replica.values()]) if by_replica else None

    def count(name: str) -> int | None:
        value = over_replicas(name, sum)
        return None if value is None else round(value)

    return EngineLoad(
        running=count("sglang:num_running_reqs"),
        queued=count("sglang:num_queue_reqs"),
        paused=count("sglang:num_paused_reqs"),
        tokens_per_second=over_replicas("sglang:gen_throughput", sum),
        kv_use=over_replicas("sglang:token_usage", fmean),
        cache_hit_rate=over_replicas("sglang:cache_hit_rate", fmean),
    )


def total(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Of the fleet: sums, and means of what is a share. None where no engine tells."""

    def numbers(values: Iterable[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    def counted(values: Iterable[int | None]) -> int | None:
        told = numbers(values)
        return round(sum(told)) if told else None

    tokens = numbers(load.tokens_per_second for load in loads)
    kv_use = numbers(load.kv_use for load in loads)
    hits = numbers(load.cache_hit_rate for load in loads)
    return EngineLoad(
        running=counted(load.running for load in loads),
        queued=counted(load.queued for load in loads),
        paused=counted(load.paused for load in loads),
        tokens_per_second=sum(tokens) if tokens else None,
        kv_use=fmean(kv_use) if kv_use else None,
        cache_hit_rate=fmean(hits) if hits else None,
    )
