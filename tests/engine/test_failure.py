"""One sentence for each way in which an engine ends."""

import pytest

from sglang_rollout.engine.failure import MAX_SENTENCE, failure_sentence, last_words

CRASH = [
    "[2026-11-29 18:01:35 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "scheduler.py", line 1, in run',
    "    raise ValueError(",
    "ValueError: the weights do not fit",
    "",
    "[2026-11-29 18:01:36] Received sigquit from a child process. It usually means the child failed.",
]
FOLLOWED = [
    *CRASH,
    "Traceback (most recent call last):",
    '  File "engine.py", line 2, in launch',
    "EOFError",
    "Killed",
]
CHAINED = [
    "Traceback (most recent call last):",
    "  File a",
    "KeyError: 'x'",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    "  File b",
    "sglang.srt.Broken.ConfigError: no such attention backend",
]
USAGE = [
    "usage: sglang serve [-h] --model-path MODEL_PATH",
    "sglang serve: error: unrecognized arguments: --no-such-flag",
]


@pytest.mark.parametrize(
    ("lines", "exit_code", "oom", "sentence"),
    [
        (CRASH, 1, False, "SGLang ended with exit code 1: ValueError: the weights do not fit"),
        (FOLLOWED, 1, False, "SGLang ended with exit code 1: ValueError: the weights do not fit"),
        (CHAINED, 1, False, "exit code 1: sglang.srt.Broken.ConfigError: no such attention backend"),
        (USAGE, 2, False, "SGLang ended with exit code 2: unrecognized arguments: --no-such-flag"),
        (["loading", "Rank 0 scheduler died, exit code: -9"], 1, False, "one of its processes was killed by SIGKILL"),
        (["still loading"], -9, False, "killed by SIGKILL (from outside, or out of memory): still loading"),
        (["x"], -11, False, "SGLang was killed by SIGSEGV: x"),
        (["x"], -200, False, "SGLang was killed by signal 200: x"),
        (CRASH, -9, True, "out of memory and was killed by the kernel: raise the memory limit"),
        ([], 3, False, "SGLang ended with exit code 3"),
        (["[2026-11-29 18:01:35] no traceback at all", ""], 0, False, "exit code 0: no traceback at all"),
    ],
)
def test_the_sentence_names_the_cause(lines: list[str], exit_code: int, oom: bool, sentence: str) -> None:
    assert sentence in failure_sentence(lines, exit_code, oom)


def test_a_consequence_is_named_when_there_is_nothing_else() -> None:
    lines = ["Traceback (most recent call last):", "  File x", "BrokenPipeError: [Errno 32] Broken pipe"]
    assert "BrokenPipeError" in failure_sentence(lines, 1)


def test_sentences_are_bounded() -> None:
    assert len(failure_sentence(["x" * 10_000], 1)) == MAX_SENTENCE


def test_last_words_skip_what_is_empty() -> None:
    assert last_words(["a", "  ", ""]) == "a"
    assert last_words([]) == ""
