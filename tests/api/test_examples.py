"""The examples are valid, strictly, and ask for nothing that is not done yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_rollout.api import SGLangRollout, unsupported_fields
from tests.api.resource_api import ResourceApi

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} >= {"quickstart-cpu", "multi-node-cpu", "gpu-8b", "external-router"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_asks_for_what_is_done(path: Path) -> None:
    assert unsupported_fields(SGLangRollout.from_object(load(path)).spec) == []


@pytest.mark.apiserver
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_server_accepts_example(path: Path, resources: ResourceApi) -> None:
    response = resources.create(load(path), dry_run=True)

    assert response.is_success, response.json()["message"]
