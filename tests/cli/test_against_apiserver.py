"""The plug-in as its users run it, against a real API server; the test plays the operator and writes the status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from e2e.cluster.apiserver import ApiServer
from e2e.cluster.gobuild import binary
from e2e.cluster.layout import Layout
from sglang_rollout.cli.metrics_reader import MetricsReader
from sglang_rollout.cli.verbs import sgrollout
from sglang_rollout.kube_access.cluster import Cluster
from sglang_rollout.kube_access.connection import connect
from sglang_rollout.kube_access.failures import Failure, Forbidden, Unreachable
from tests.api.objects import Object, rollout
from tests.cli.conftest import NAMESPACE
from tests.cli.fake_cluster import condition, engine

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(180)]

CHECKOUT = Path(__file__).parents[2]
Process = subprocess.Popen[str]


def start(kubeconfig: Path, *words: str) -> Process:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(CHECKOUT / "operator")}
    return subprocess.Popen(
        [sys.executable, "-m", "sglang_rollout.cli", *words, "-n", NAMESPACE],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ended(process: Process) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def call(kubeconfig: Path, *words: str) -> tuple[int, str, str]:
    return ended(start(kubeconfig, *words))


class Fleet:
    """A resource of its own for each test, and the operator's part of it."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.server = server
        self.name = name
        body = rollout(name, replicas=2) | {"metadata": {"name": name, "namespace": NAMESPACE}}
        server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body))

    def read(self) -> Object:
        answer: Object = json.loads(self.server.kubectl("get", "sgr", self.name, "-n", NAMESPACE, "-o", "json"))
        return answer

    def answer(self, **status: Any) -> None:
        """Status of the present generation."""
        self.status({"observedGeneration": self.read()["metadata"]["generation"], **status})

    def status(self, status: Object) -> None:
        self.server.kubectl(
            "patch", "sgr", self.name, "-n", NAMESPACE, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )  # fmt: skip

    def await_generation(self, generation: int) -> None:
        deadline = time.monotonic() + 40
        while self.read()["metadata"]["generation"] < generation:
            assert time.monotonic() < deadline, "the patch did not come"
            time.sleep(0.1)


@pytest.fixture
def fleet(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    name = f"f-{abs(hash(request.node.name)) % 10**8}"
    yield Fleet(server, name)
    server.kubectl("delete", "sgr", name, "-n", NAMESPACE, "--ignore-not-found")


def paused(*flags: bool) -> list[Object]:
    return [engine(index, paused=flag) for index, flag in enumerate(flags)]


def test_pause_waits_for_the_operator_and_for_its_generation(server: ApiServer, fleet: Fleet) -> None:
    # What was true of the generation before must not count.
    fleet.answer(executionState="Paused", engines=paused(True, True))
    process = start(server.kubeconfig, "pause", fleet.name, "-o", "json", "--timeout", "60s")
    fleet.await_generation(2)
    fleet.status({"engines": paused(False, True)})
    time.sleep(1.0)
    assert process.poll() is None
    fleet.answer(executionState="Pausing")
    fleet.answer(executionState="Paused", engines=paused(True, True))

    code, out, err = ended(process)

    assert code == 0, err
    answer = json.loads(out)
    assert (answer["outcome"], answer["generation"], answer["message"]) == ("Done", 2, "2 of 2 engines are paused")
    assert f"pause {fleet.name} (0/2): the operator has not seen the change yet" in err
    kubectl_get = ("get", "sgr", fleet.name, "-n", NAMESPACE, "-o", "json", "--show-managed-fields")
    managers = {entry["manager"] for entry in json.loads(server.kubectl(*kubectl_get))["metadata"]["managedFields"]}
    assert "kubectl-sgrollout" in managers


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("release {}", 1, "execution.state Running needs all of memory Resident"),
        ("weights set {} default --path /models/x", 1, "is what SGLang calls weights that nobody has labelled"),
        ("weights set {} 2 --path models/x", 1, "spec.weights.source.disk.path"),
        ("pause {} --timeout 1s", 3, "the operator has not seen the change yet"),
        ("pause nobody", 4, '"nobody" not found'),
        ("status nobody", 4, '"nobody" not found'),
        ("pause {} --timeout soon", 2, "write 90s"),
    ],
)
def test_exit_codes(words: str, code: int, said: str, server: ApiServer, fleet: Fleet) -> None:
    ended_with, _, err = call(server.kubeconfig, *words.format(fleet.name).split())

    assert ended_with == code
    assert said in err


def test_the_api_accepts_every_patch(server: ApiServer, fleet: Fleet) -> None:
    for words in (
        "pause {} --mode InPlace",
        "weights set {} 2 --path /models/2",
        "weights set {} 3 --path /models/3",
        "release {} --kv --graphs",
        "release {}",
        "resume {} --continue",
        "check {} compare",
        "check {} checksum",
        "profile {} --steps 3",
        "profile {}",
        "restart {}",
    ):
        where = ["-n", NAMESPACE, "--kubeconfig", str(server.kubeconfig)]
        result = CliRunner().invoke(sgrollout, [*words.format(fleet.name).split(), "--no-wait", *where])
        assert result.exit_code == 0, f"{words}: {result.output}"
        assert "not waiting" in result.output

    spec = fleet.read()["spec"]
    assert spec["execution"] == {"state": "Running", "pauseMode": "InPlace"}
    assert set(spec["memory"].values()) == {"Resident", "None"}
    assert spec["weights"]["version"] == "3"
    assert spec["weights"]["source"] == {"type": "Disk", "disk": {"path": "/models/3"}}
    assert spec["weightCheck"]["action"] == "Checksum"
    assert spec["profile"]["steps"] == 5


def test_a_failed_move_is_told_in_the_operators_words(server: ApiServer, fleet: Fleet) -> None:
    process = start(server.kubeconfig, "weights", "set", fleet.name, "2", "--path", "/models/2")
    fleet.await_generation(2)
    move = {"id": "t", "version": "2", "message": "no config.json in /models/2"}
    fleet.answer(weights={"version": "1", "targetVersion": "2", "phase": "Failed", "transaction": move})

    code, _, err = ended(process)

    assert (code, "2: no config.json in /models/2; 1 serves on" in err) == (1, True), err


@pytest.mark.parametrize(("result", "code"), [("Passed", 0), ("Mismatch", 1)])
def test_check_ends_with_its_result(result: str, code: int, server: ApiServer, fleet: Fleet) -> None:
    process = start(server.kubeconfig, "check", fleet.name, "compare", "--request-id", "7", "-o", "json")
    fleet.await_generation(2)
    fleet.answer(lastWeightCheck={"requestID": "7", "action": "Compare", "result": result, "message": "m"})

    ended_with, out, err = ended(process)

    assert ended_with == code, err
    assert json.loads(out)["fleet"]["status"]["lastWeightCheck"]["result"] == result


def test_a_fleet_that_is_deleted_is_not_waited_for(server: ApiServer, fleet: Fleet) -> None:
    process = start(server.kubeconfig, "weights", "wait", fleet.name, "5")
    assert process.stderr is not None
    process.stderr.readline()  # it waits
    server.kubectl("delete", "sgr", fleet.name, "-n", NAMESPACE)

    code, _, err = ended(process)

    assert (code, "was deleted meanwhile" in err) == (4, True), err


def test_watch_streams_every_change_as_json(server: ApiServer, fleet: Fleet) -> None:
    process = start(server.kubeconfig, "status", fleet.name, "--watch", "-o", "json")
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline())
        fleet.answer(executionState="Running", conditions=[condition("Ready", True, "AllRoutable", "fine")])
        second = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()

    assert (first["answered"], first["ready"]) == (False, False)
    assert (second["answered"], second["ready"], second["reason"]) == (True, True, "AllRoutable")


VERBS = {
    "one-fleet": ["get", "patch", "watch", "list"],  # by its name alone
    "no-watch": ["get", "patch"],
    "reader": ["get", "list", "watch"],
}


@pytest.mark.parametrize(
    ("role", "code", "said"),
    [
        ("one-fleet", 0, "2 of 2 engines are paused"),
        ("no-watch", 0, "2 of 2 engines are paused"),
        ("reader", 5, "forbidden"),
    ],
)
def test_rights_on_the_resource_are_enough(role: str, code: int, said: str, server: ApiServer, fleet: Fleet) -> None:
    user = server.user(f"{role}-user")
    rule = {"apiGroups": ["rollout.sglang.io"], "resources": ["sglangrollouts"], "verbs": VERBS[role]}
    if role == "one-fleet":
        rule["resourceNames"] = [fleet.name]
    group = "rbac.authorization.k8s.io"
    metadata = {"name": role, "namespace": NAMESPACE}
    objects: list[Object] = [
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": role},
            "subjects": [{"kind": "User", "apiGroup": group, "name": f"{role}-user"}],
        },
    ]
    server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    process = start(user, "pause", fleet.name)
    if code == 0:
        fleet.await_generation(2)
        fleet.answer(executionState="Paused", engines=paused(True, True))

    ended_with, out, err = ended(process)

    assert ended_with == code, err
    assert said in out + err


def test_kubectl_finds_the_plug_in(server: ApiServer, fleet: Fleet, tmp_path: Path) -> None:
    """kubectl runs programs of the name kubectl-sgrollout on the PATH."""
    script = tmp_path / "kubectl-sgrollout"
    script.write_text(f"#!{sys.executable}\nfrom sglang_rollout.cli.__main__ import main\nmain()\n")
    script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT / "operator"),
        "KUBECONFIG": str(server.kubeconfig),
    }
    kubectl = str(binary(Layout.default(), "kubectl"))
    result = subprocess.run(
        [kubectl, "sgrollout", "status", "-n", NAMESPACE], env=environment, capture_output=True, text=True, timeout=60
    )

    assert result.returncode == 0, result.stderr
    assert fleet.name in result.stdout


class Metrics(BaseHTTPRequestHandler):
    """/metrics of an engine."""

    def do_GET(self) -> None:
        body = b"sglang:num_running_reqs 3\n" if self.path == "/metrics" else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def engine_pod(server: ApiServer) -> Iterator[tuple[str, int]]:
    """A pod object whose address is this machine's own, where an engine's metrics are served: (name, port)."""
    own = own_address()
    with ThreadingHTTPServer((own, 0), Metrics) as metrics:
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "e0-0", "namespace": NAMESPACE}} | {
            "spec": {"containers": [{"name": "engine", "image": "x"}], "nodeName": "nowhere"}
        }
        server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod))
        status = json.dumps({"status": {"phase": "Running", "podIP": own, "podIPs": [{"ip": own}]}})
        server.kubectl("patch", "pod", "e0-0", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status)
        yield "e0-0", metrics.server_address[1]
        metrics.shutdown()
        server.kubectl("delete", "pod", "e0-0", "-n", NAMESPACE, "--grace-period=0", "--force")


def own_address() -> str:
    """Not a loopback one: the API server's pod proxy refuses those. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def metrics_of(kubeconfig: Path, pod: str, port: int) -> str:
    return MetricsReader(Cluster(connect(str(kubeconfig), None, NAMESPACE), "test"), port).read(pod)


def test_metrics_come_through_the_pod_proxy(server: ApiServer, engine_pod: tuple[str, int]) -> None:
    assert metrics_of(server.kubeconfig, *engine_pod) == "sglang:num_running_reqs 3\n"


@pytest.mark.parametrize(
    ("user", "port", "kind", "said"),
    [("stranger", None, Forbidden, "top needs the right to get pods/proxy"), ("admin", 1, Unreachable, "port-forward")],
)
def test_metrics_that_cannot_be_read(
    user: str, port: int | None, kind: type[Failure], said: str, server: ApiServer, engine_pod: tuple[str, int]
) -> None:
    kubeconfig = server.kubeconfig if user == "admin" else server.user(user)

    with pytest.raises(kind, match=said):
        metrics_of(kubeconfig, engine_pod[0], port or engine_pod[1])
