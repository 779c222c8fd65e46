"""docs/kubectl-plugin.md says what the plug-in does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sglang_rollout.cli.exits import ExitCode
from sglang_rollout.cli.verbs import sgrollout

TEXT = (Path(__file__).parents[2] / "docs/kubectl-plugin.md").read_text()
EVERYWHERE = {"-n", "--context", "--kubeconfig", "-o", "--timeout", "--wait", "--no-wait", "--help"}


def verbs(group: click.Group = sgrollout, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_exit_codes() -> None:
    table = TEXT.split("## Exit codes")[1].split("##")[0]

    assert [int(code) for code in re.findall(r"^\| (\d+) ", table, re.MULTILINE)] == [int(code) for code in ExitCode]


@pytest.mark.parametrize(("name", "command"), list(verbs()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_verb_and_option_is_told(name: str, command: click.Command) -> None:
    assert f"`{name} " in TEXT
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not EVERYWHERE.intersection(parameter.opts):
            assert any(option in TEXT for option in parameter.opts), parameter.opts
