"""The checks that a GPU computes are those of the host, on the same bytes."""

from __future__ import annotations

import subprocess

import pytest

from e2e.sglang_cpu import environment

from .test_gloo import python_environment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(120)]


def test_checks_by_torch_and_by_numpy_agree() -> None:
    done = subprocess.run(
        [str(environment.interpreter()), "-m", "e2e.transports.checks"],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
