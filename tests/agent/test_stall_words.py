from sglang_rollout.agent.stall_words import stall_words


def test_says_what_each_route_took_and_what_is_left() -> None:
    spent = {"/pause_generation": 0.0161, "/flush_cache": 0.001}
    assert stall_words(0.05, spent) == "50.0 ms: pause_generation 16.1, flush_cache 1.0, the agent and others 32.9"


def test_calls_that_overlap_leave_nothing_negative() -> None:
    assert stall_words(0.001, {"/health": 0.002}).endswith("the agent and others 0.0")
