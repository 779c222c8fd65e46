"""Engines' load from their metrics."""

from __future__ import annotations

import pytest

from sglang_rollout.cli.engine_metrics import EngineLoad, parse_load, total

ONE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="m",tp_rank="0"} 123.5
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
# TYPE sglang:cache_hit_rate gauge
sglang:cache_hit_rate{model_name="m",tp_rank="0"} 0.5
"""
REPLICAS = """\
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 1
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 1
sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 4
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.25
sglang:token_usage{dp_rank="1",tp_rank="2"} 0.75
"""
PRIORITIES = """\
sglang:num_queue_reqs{priority=""} 5
sglang:num_queue_reqs{priority="1"} 2
sglang:num_queue_reqs{priority="2"} 3
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, EngineLoad(running=3, queued=2, tokens_per_second=123.5, kv_use=0.25, cache_hit_rate=0.5)),
        (REPLICAS, EngineLoad(running=5, kv_use=0.5)),
        (PRIORITIES, EngineLoad(queued=5)),
        ("", EngineLoad()),
        ("other_metric 1\n", EngineLoad()),
    ],
    ids=["one", "data-parallel", "priorities", "nothing", "foreign"],
)
def test_load(text: str, expected: EngineLoad) -> None:
    assert parse_load(text) == expected


def test_a_page_that_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own words
        parse_load("<html>\n<p>Bad Gateway</p>")


def test_total_adds_counts_and_averages_shares() -> None:
    loads = [
        EngineLoad(running=1, queued=0, tokens_per_second=10, kv_use=0.25),
        EngineLoad(running=2, queued=5, tokens_per_second=30, kv_use=0.75),
        EngineLoad(),
    ]

    assert total(loads) == EngineLoad(running=3, queued=5, tokens_per_second=40, kv_use=0.5)
    assert total([]) == EngineLoad()
