"""These tests need torch, which the engine's environment has: e2e/loader runs them there."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "torch", reason="the engine's environment has it, where e2e/loader runs this folder", exc_type=ImportError
)
