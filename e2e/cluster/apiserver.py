"""Bare etcd and kube-apiserver, ready in seconds: for tests that need the API and no nodes.

No controllers run: nothing is garbage collected, no pod gets an address, no namespace gets a default service account
(the admission plugin that asks for one is off), and aggregated roles such as `view` are empty. RBAC, TokenRequest, the
token keys (/openid/v1/jwks), CRDs with CEL, server-side apply and watches are the real thing.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import yaml

from e2e.cluster import gobuild
from e2e.cluster.certificates import Authority
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.process import run
from e2e.cluster.progress import say

ISSUER = "https://kubernetes.default.svc.cluster.local"
"""The `iss` of service account tokens, and the default audience."""
_SUPERVISOR = Path(__file__).with_name("supervise.py")
_RAM = Path("/dev/shm")
_RAM_NEEDED = 512 * 2**20


class ApiServer:
    """`with ApiServer() as server:` starts both programs and ends them; so does the end of this process, any end.

    Attributes: `url`, `folder` (data, certificates, logs; in memory where possible), `ca`, `client_certificate` and
    `client_key` of a cluster admin, `kubeconfig` of the same. `flags` are added to kube-apiserver's.
    """

    def __init__(self, *flags: str, timeout: float = 60, layout: Layout | None = None) -> None:
        self._flags = flags
        self._timeout = timeout
        self._layout = layout or Layout.default()
        self._supervisor: subprocess.Popen[str] | None = None

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Build the programs if need be, start them, and return when /readyz is ok. Raises ClusterError."""
        gobuild.build(self._layout, gobuild.API_SERVER)
        for attempt in (1, 2, 3):
            try:
                self._start()
                return
            except ClusterError as error:
                self.stop()
                # A free port may be taken by another program before ours has it.
                if attempt == 3 or "address already in use" not in str(error):
                    raise
                say("a port was taken by another program: once more")

    def _start(self) -> None:
        ram = _RAM.is_dir() and os.access(_RAM, os.W_OK) and shutil.disk_usage(_RAM).free > _RAM_NEEDED
        self.folder = Path(tempfile.mkdtemp(prefix="sglang-rollout-api-", dir=_RAM if ram else None))
        self._authority = Authority(self.folder)
        self.ca = self._authority.certificate
        self._etcd_port, peer_port, self.port = _free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.client_certificate, self.client_key = self._authority.issue("admin", "admin", ("system:masters",))
        self.kubeconfig = self._write_kubeconfig("admin", self.client_certificate, self.client_key)
        order = {
            "programs": [
                {"argv": self._etcd(peer_port), "log": str(self.folder / "etcd.log")},
                {"argv": self._kube_apiserver(), "log": str(self.folder / "kube-apiserver.log")},
            ],
            "remove": [str(self.folder)],
        }
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR)], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(json.dumps(order) + "\n")
        self._supervisor.stdin.flush()
        self._await_ready()

    def stop(self) -> None:
        """End both programs and remove the folder."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            try:
                supervisor.wait(timeout=20)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                supervisor.wait(timeout=5)
            shutil.rmtree(self.folder, ignore_errors=True)

    def kubectl(self, *args: str, timeout: float = 30, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as the admin and return what it prints."""
        command = gobuild.binary(self._layout, "kubectl")
        env = {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        return run([command, *args], timeout=timeout, env=env, stdin=stdin, check=check).stdout

    def user(self, name: str, groups: tuple[str, ...] = ()) -> Path:
        """A kubeconfig for another user, who may do what RBAC lets them."""
        file = "user-" + "".join(letter if letter.isalnum() else "-" for letter in name)
        certificate, key = self._authority.issue(file, name, groups)
        return self._write_kubeconfig(file, certificate, key)

    def ssl_context(self) -> ssl.SSLContext:
        """Trusts this server, and presents the admin."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.client_certificate, self.client_key)
        return context

    def _etcd(self, peer_port: int) -> list[str]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{peer_port}"
        return [
            str(gobuild.binary(self._layout, "etcd")), "--name=bare", f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=bare={peer}",
            "--unsafe-no-fsync", "--log-level=warn", "--quota-backend-bytes=4294967296",
        ]  # fmt: skip

    def _kube_apiserver(self) -> list[str]:
        hosts = ("localhost", "127.0.0.1", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        certificate, key = self._authority.issue("serving", "kube-apiserver", hosts=hosts)
        signing, verifying = self._authority.token_keys()
        return [
            str(gobuild.binary(self._layout, "kube-apiserver")),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1", f"--secure-port={self.port}", "--advertise-address=127.0.0.1",
            f"--cert-dir={self.folder}", f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}",
            f"--client-ca-file={self.ca}", "--authorization-mode=RBAC", "--allow-privileged=true",
            f"--service-account-issuer={ISSUER}", f"--service-account-key-file={verifying}",
            f"--service-account-signing-key-file={signing}", "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none", "--profiling=false",
            *self._flags,
        ]  # fmt: skip

    def _await_ready(self) -> None:
        assert self._supervisor is not None
        context = self.ssl_context()
        deadline = time.monotonic() + self._timeout
        answer = "no answer yet"
        while True:
            if self._supervisor.poll() is not None:
                raise ClusterError(f"etcd or kube-apiserver ended while starting{self._last_words()}")
            try:
                connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=5)
                connection.request("GET", "/readyz?verbose")
                response = connection.getresponse()
                answer = response.read().decode()
                connection.close()
                if response.status == 200:
                    return
            except OSError as error:
                answer = str(error)
            if time.monotonic() > deadline:
                raise ClusterError(f"kube-apiserver is not ready after {self._timeout:.0f} s: {answer}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        """The logs, where they are still there: the supervisor removes them with the folder."""
        text = ""
        for name in ("etcd", "kube-apiserver"):
            log = self.folder / f"{name}.log"
            if log.exists():
                text += f"\n{name}: " + "\n  ".join(log.read_text(errors="replace").splitlines()[-10:])
        return text

    def _write_kubeconfig(self, name: str, certificate: Path, key: Path) -> Path:
        path = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        user = {"client-certificate": str(certificate), "client-key": str(key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bare", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "bare", "context": {"cluster": "bare", "user": name}}],
            "current-context": "bare",
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(document))
        return path


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
