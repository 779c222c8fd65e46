"""The environment: defaults, and a sentence for everything that cannot be read."""

from __future__ import annotations

import pytest

from sglang_rollout.controller.settings import SettingsError, from_environment

LEAST = {
    "OPERATOR_NAMESPACE": "ops",
    "POD_NAME": "operator-0",
    "OPERATOR_SERVICE_ACCOUNT": "operator",
    "AGENT_IMAGE": "agent:1",
    "ROUTER_IMAGE": "router:1",
}


def test_defaults() -> None:
    settings = from_environment(LEAST)
    assert settings.watch_namespaces == ()
    assert settings.metrics_port == 8080
    assert settings.lease_name == "sglang-rollout"
    assert settings.pod_labels == {}


def test_everything_set() -> None:
    settings = from_environment(
        {
            **LEAST,
            "WATCH_NAMESPACES": "b, a,b",
            "METRICS_PORT": "9090",
            "LOG_LEVEL": "debug",
            "OPERATOR_POD_LABELS": "app=x, part=operator",
        }
    )
    assert settings.watch_namespaces == ("a", "b")
    assert settings.metrics_port == 9090
    assert settings.log_level == "DEBUG"
    assert settings.pod_labels == {"app": "x", "part": "operator"}


@pytest.mark.parametrize("name", LEAST)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be set"):
        from_environment({**LEAST, name: " "})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("METRICS_PORT", "http", "METRICS_PORT must be a number, not 'http'"),
        ("WORKERS", "0", "WORKERS must be at least 1, not 0"),
        ("LOG_LEVEL", "loud", "LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR"),
        ("OPERATOR_POD_LABELS", "app", "OPERATOR_POD_LABELS must be label=value pairs"),
    ],
)
def test_what_cannot_be_read_is_told(name: str, value: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        from_environment({**LEAST, name: value})
