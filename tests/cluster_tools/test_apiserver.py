"""The bare API server: real tokens, real RBAC, and nothing left when its starter is killed."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest

from e2e.cluster.apiserver import ISSUER, ApiServer
from e2e.cluster.errors import ClusterError
from e2e.cluster.process import wait_for

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def test_service_account_tokens_are_signed_by_the_published_keys(server: ApiServer) -> None:
    server.kubectl("create", "serviceaccount", "caller")
    token = server.kubectl("create", "token", "caller", "--audience=fleet", "--duration=10m")
    keys = jwt.PyJWKSet.from_dict(json.loads(server.kubectl("get", "--raw", "/openid/v1/jwks")))
    key = keys[jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["RS256"], audience="fleet", issuer=ISSUER)
    assert claims["sub"] == "system:serviceaccount:default:caller"


def test_rbac_decides(server: ApiServer) -> None:
    nobody = server.user("somebody")
    with pytest.raises(ClusterError, match="Forbidden"):
        server.kubectl("get", "configmaps", f"--kubeconfig={nobody}")
    server.kubectl("create", "role", "reader", "--verb=get,list", "--resource=configmaps")
    server.kubectl("create", "rolebinding", "reader", "--role=reader", "--user=somebody")

    def allowed() -> bool:
        answer = server.kubectl("auth", "can-i", "list", "configmaps", f"--kubeconfig={nobody}", check=False)
        return answer.strip() == "yes"

    wait_for("the authorizer to see the binding", allowed, timeout=10, every=0.1)
    server.kubectl("get", "configmaps", f"--kubeconfig={nobody}")


def test_strangers_are_unauthorized(server: ApiServer) -> None:
    trusting = ssl.create_default_context(cafile=str(server.ca))
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        urllib.request.urlopen(f"{server.url}/api/v1/namespaces", context=trusting, timeout=10)


def test_secrets_are_for_the_owner_only(server: ApiServer) -> None:
    for name in ("admin.key", "tokens.key", "admin.kubeconfig"):
        assert (server.folder / name).stat().st_mode & 0o077 == 0


_STARTER = """
import sys, time
from e2e.cluster.apiserver import ApiServer
server = ApiServer()
server.start()
print(server.folder, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_starter_is_killed() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True, env=env) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        assert folder.is_dir()
        assert _commands_with(str(folder))
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (folder.exists() or _commands_with(str(folder))):
        time.sleep(0.1)
    assert not _commands_with(str(folder))
    assert not folder.exists()


def test_a_refused_flag_is_shown() -> None:
    with pytest.raises(ClusterError, match="unknown flag: --nonsense"):
        ApiServer("--nonsense").start()


def _commands_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if text in command:
                found.append(command)
    return found
