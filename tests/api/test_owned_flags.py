"""Nothing that argparse would take for a flag of the operator gets through, and nothing else is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from sglang_rollout.api.owned_flags import ENGINE_FLAGS, ROUTER_FLAGS, OwnedFlags

DATA = Path(__file__).parent / "data"
PROGRAMS = [
    pytest.param(ENGINE_FLAGS, DATA / "sglang-0.5.23-flags.txt", id="sglang"),
    pytest.param(ROUTER_FLAGS, DATA / "smg-1.13.0-flags.txt", id="smg"),
]
# What the API promises; each must stay owned whatever else is.
PROMISED_ENGINE_FLAGS = (
    "--model-path", "--model", "--host", "--port", "--tp-size", "--tensor-parallel-size", "--pp-size",
    "--pipeline-parallel-size", "--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--weight-version",
    "--enable-memory-saver", "--enable-weights-cpu-backup", "--custom-weight-loader", "--admin-api-key", "--api-key",
    "--config", "--tokenizer-worker-num", "--dp-size", "--data-parallel-size", "--ep-size", "--ep",
    "--expert-parallel-size", "--served-model-name",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Raises where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def flags_of(program: Path) -> list[str]:
    return program.read_text().split()


@pytest.mark.parametrize("flag", PROMISED_ENGINE_FLAGS)
def test_engine_flags_that_must_be_owned(flag: str) -> None:
    assert ENGINE_FLAGS.owner_of(flag) == flag


@pytest.mark.parametrize(("owned", "program"), PROGRAMS)
def test_owned_flags_exist(owned: OwnedFlags, program: Path) -> None:
    assert set(owned.flags) <= set(flags_of(program))


@pytest.mark.parametrize(("owned", "program"), PROGRAMS)
def test_flags_of_others_are_free(owned: OwnedFlags, program: Path) -> None:
    others = set(flags_of(program)) - set(owned.flags)

    assert [flag for flag in others if owned.owner_of(flag) or owned.owner_of(f"{flag}=1")] == []


@pytest.mark.parametrize(("owned", "program"), PROGRAMS)
def test_what_argparse_takes_for_an_owned_flag_is_refused(owned: OwnedFlags, program: Path) -> None:
    """Every prefix of every flag, given to argparse itself: it is either another flag, or an error, or refused."""
    parser = Parser(add_help=False)
    for flag in flags_of(program):
        parser.add_argument(flag, dest=flag, nargs="?", const="set", default=None)
    prefixes = {flag[:end] for flag in owned.flags for end in range(3, len(flag) + 1)}

    slipped_through = [prefix for prefix in prefixes if _sets(parser, prefix) & set(owned.flags)]

    assert set(owned.flags) <= set(slipped_through), "argparse does not know the owned flags: the test is void"
    assert [p for p in slipped_through for form in (p, f"{p}=x") if not owned.owner_of(form)] == []


def _sets(parser: argparse.ArgumentParser, argument: str) -> set[str]:
    try:
        found, _ = parser.parse_known_args([argument])
    except argparse.ArgumentError:
        return set()
    return {flag for flag, value in vars(found).items() if value is not None}


@pytest.mark.parametrize("argument", ["0.8", "/models/x", "-1", "host", "", "{}", "--mem-fraction-static=0.8"])
def test_values_and_other_flags_are_free(argument: str) -> None:
    assert ENGINE_FLAGS.owner_of(argument) is None


@pytest.mark.parametrize("argument", ["--host 0.0.0.0", "--ho", "--host=", "--"])
def test_other_spellings_are_refused(argument: str) -> None:
    assert ENGINE_FLAGS.owner_of(argument) is not None
