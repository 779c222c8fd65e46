"""The rules over what clients got: each finds what it is for, and nothing else."""

from __future__ import annotations

from e2e.deployment.answers import Answer, failures, mislabelled, other_than, side_by_side, torn, versions

FINGERPRINTS = {"1": (-1.0, -2.0), "2": (-4.0, -0.5)}


def answer(sent: float, received: float, version: str, *, spans: tuple[str, ...] | None = None) -> Answer:
    logprobs = FINGERPRINTS.get(version)
    return Answer(sent, received, 200, version=version, spans=spans or (version,), prompt_logprobs=logprobs)


def test_a_clean_switch_breaks_no_rule() -> None:
    # The third was sent before the switch and answered after it: it waited out the pause.
    given = [answer(0, 1, "1"), answer(1, 2, "1"), answer(1.5, 3, "1"), answer(2.5, 4, "2"), answer(4, 5, "2")]
    assert side_by_side(given, ["1", "2"]) == []
    assert mislabelled(given, FINGERPRINTS) == []
    assert failures(given) == []
    assert versions(given) == {"1": 3, "2": 2}


def test_an_old_answer_after_a_new_one_is_found() -> None:
    new, old = answer(1, 2, "2"), answer(2.1, 3, "1")
    assert side_by_side([old, new], ["1", "2"]) == [(new, old)]


def test_versions_that_come_back_are_found_over_three_versions() -> None:
    pairs = side_by_side([answer(0, 1, "3"), answer(2, 3, "2"), answer(4, 5, "1")], ["1", "2", "3"])
    assert {late.version for _, late in pairs} == {"1", "2"}


def test_a_label_that_differs_from_the_weights_is_found() -> None:
    wrong = Answer(0, 1, 200, version="2", spans=("2",), prompt_logprobs=FINGERPRINTS["1"])
    without = Answer(0, 1, 200, version="2", spans=("2",), prompt_logprobs=())
    not_asked = Answer(0, 1, 200, version="2", spans=("2",))
    spanning = answer(0, 1, "2", spans=("1", "2"))
    assert mislabelled([wrong, without, not_asked, spanning, answer(0, 1, "1")], FINGERPRINTS) == [wrong, without]


def test_failures_are_told_once_with_their_count() -> None:
    gone = Answer(0, 1, 0, "ConnectError: refused")
    assert failures([gone, gone, answer(0, 1, "1"), Answer(0, 1, 503, "no workers")]) == [
        "2 x 0 ConnectError: refused",
        "1 x 503 no workers",
    ]


def test_versions_that_are_not_allowed_are_found_and_failures_are_not_taken_for_them() -> None:
    old = answer(0, 1, "1")
    assert other_than([old, answer(0, 1, "2"), Answer(0, 1, 503)], {"2"}) == [old]


def test_versions_in_another_order_than_the_fleets_are_found() -> None:
    back, beyond, other = (answer(0, 1, "1", spans=spans) for spans in (("2", "1"), ("1", "2"), ("7", "1")))
    through = answer(0, 1, "3", spans=("1", "3"))
    assert torn([back, beyond, other, through, answer(0, 1, "2")], ["1", "2", "3"]) == [back, beyond, other]
