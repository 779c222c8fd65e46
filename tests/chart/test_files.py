"""What can be checked of the chart without Helm."""

from __future__ import annotations

import json
import re

import yaml

from sglang_rollout.api import crd
from tests.chart.rendering import CHART


def test_the_chart_carries_the_generated_crd() -> None:
    assert crd.CHART_FILE.read_text() == crd.render(), "the chart's CRD is not that of the models: run `make crds`"


def test_every_value_is_in_the_schema_and_explained() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema.keys() - {"global"}
    for name, value in values.items():
        if isinstance(value, dict) and "properties" in schema[name]:
            assert value.keys() == schema[name]["properties"].keys(), name


def test_the_chart_names_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[1] / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, flags=re.MULTILINE)
    assert chart["version"] == chart["appVersion"] == version
