"""The command and the environment that SGLang is started with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_rollout.engine.launch_settings import SITE, LaunchSettings, key_config
from sglang_rollout.engine.serve import FirstValueHolds, pin
from sglang_rollout.protocol import pod
from sglang_rollout.protocol.launch import LaunchOrder
from sglang_rollout.protocol.memory import LaunchOptions
from sglang_rollout.protocol.wire import to_wire

ORDER = to_wire(LaunchOrder("/models/v1", "-1", "10.0.0.7:30010"))


def settings(**environment: str) -> LaunchSettings:
    return LaunchSettings.read({pod.ENV_RUN_DIR: "/run/x", **environment}, ["--", "--tp-size=2"])


def flags(command: list[str]) -> list[str]:
    return command[2:]


def test_the_command_of_one_node() -> None:
    command = settings(**{pod.ENV_SERVED_NAME: "m", pod.ENV_ENGINE_PORT: "31000"}).command(ORDER)
    assert flags(command) == [
        "--config",
        "/run/x/engine-config.yaml",
        "--tp-size=2",
        "--model-path=/models/v1",
        "--weight-version=-1",
        "--host=0.0.0.0",
        "--port=31000",
        "--served-model-name=m",
        "--enable-metrics",
    ]


def test_the_members_of_a_group_meet_at_the_ordered_address() -> None:
    command = settings(**{pod.ENV_NODES: "2", pod.ENV_RANK: "1"}).command(ORDER)
    assert {"--nnodes=2", "--node-rank=1", "--dist-init-addr=10.0.0.7:30010"} <= set(command)


def test_an_ipv6_pod_is_served_on_ipv6() -> None:
    assert "--host=::" in settings(**{pod.ENV_POD_IP: "fd00::1"}).command(ORDER)


def test_our_packages_do_not_hide_those_of_the_image() -> None:
    changed = settings().environment({"PYTHONPATH": f"{SITE}:/opt/extra", "HOME": "/h"})
    assert changed["PYTHONPATH"] == "/opt/extra"
    assert changed["HOME"] == "/h"
    assert changed["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert "PYTHONPATH" not in settings().environment({"PYTHONPATH": str(SITE)})


def test_an_engine_with_a_stage_gets_the_weight_loader_and_our_package_alone(tmp_path: Path) -> None:
    staged = settings(**{pod.ENV_STAGE_MEDIUM: "Host", pod.ENV_RUN_DIR: str(tmp_path)})
    assert "--custom-weight-loader=sglang_rollout.engine.weight_loader.load" in staged.command(ORDER)
    for _ in range(2):
        staged.place_hook()
    path = staged.environment({"PYTHONPATH": f"{SITE}:/opt/extra"})["PYTHONPATH"]
    assert path == f"/opt/extra:{tmp_path}/hook"
    assert [entry.name for entry in (tmp_path / "hook").iterdir()] == ["sglang_rollout"]
    code = "import sglang_rollout.engine.weight_loader as loader; print(loader.__file__)"
    found = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert found.stdout.startswith(str(tmp_path)), found.stderr
    assert not settings(**{pod.ENV_STAGE_MEDIUM: "None"}).hook


@pytest.mark.parametrize("argv", [[], ["--tp-size=2"]])
def test_a_wrong_call_is_explained(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="usage"):
        LaunchSettings.read({}, argv)


def test_keys_are_in_the_configuration_only(tmp_path: Path) -> None:
    assert json.loads(key_config("d", "a")) == {"api-key": "d", "admin-api-key": "a"}


def test_the_first_value_holds() -> None:
    class Manager:
        def __init__(self, name: str) -> None:
            self.name: Any = name

    pin(Manager, "name")
    one, other = Manager("m"), Manager("n")
    one.name = "/models/v2"
    assert (one.name, other.name) == ("m", "n")
    assert isinstance(Manager.__dict__["name"], FirstValueHolds)
    with pytest.raises(AttributeError, match="name"):
        _ = Manager.__new__(Manager).name


@pytest.mark.parametrize(
    ("launch", "args", "added"),
    [
        (LaunchOptions(), [], []),
        (LaunchOptions(memory_saver=True), [], ["--enable-memory-saver"]),
        (LaunchOptions(True, True), ["--device=cuda"], ["--enable-memory-saver", "--enable-weights-cpu-backup"]),
        (LaunchOptions(True, True), ["--device=cpu"], []),
        (LaunchOptions(True, True), ["--device", "cpu"], []),
    ],
)
def test_flags_of_the_memory_saver(launch: LaunchOptions, args: list[str], added: list[str]) -> None:
    order = to_wire(LaunchOrder("/models/v1", "1", launch=launch))
    made = LaunchSettings.read({pod.ENV_RUN_DIR: "/run/x"}, ["--", *args])
    assert [flag for flag in flags(made.command(order)) if flag.startswith("--enable-")] == [*added, "--enable-metrics"]
