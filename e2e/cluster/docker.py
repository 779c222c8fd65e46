"""Docker: the one that the user has, or a private daemon that shares nothing with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from e2e.cluster import capabilities, versions
from e2e.cluster.debian import ensure_packages
from e2e.cluster.errors import ClusterError
from e2e.cluster.host_network import HostNetwork
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.mounts import remove_tree, unmount_below
from e2e.cluster.process import ProcessMark, daemon, run, start_daemon, stop_daemon, wait_for, write_atomically
from e2e.cluster.progress import say, step

_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the distribution's Docker is; /usr/local may hold something else by the same name."""


class Engine(Protocol):
    """A Docker daemon that this project may use."""

    @property
    def private(self) -> bool: ...

    @property
    def client(self) -> Path:
        """The docker command."""

    @property
    def env(self) -> dict[str, str]:
        """What a docker command needs in its environment to reach this daemon."""

    def start(self) -> None:
        """Make sure that it runs."""

    def stop(self) -> None:
        """End it, if it is ours."""

    def docker(
        self, *args: str, timeout: float = 120, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one docker command."""


@dataclass(frozen=True)
class ExistingDocker:
    """The user's own Docker, reached as the user reaches it. Never started, stopped or configured."""

    client: Path
    private: bool = False
    env: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """It runs already."""

    def stop(self) -> None:
        """It is not ours."""

    def docker(
        self, *args: str, timeout: float = 120, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run([self.client, *args], timeout=timeout, check=check, stdin=stdin)


@dataclass(frozen=True)
class Daemon:
    """A private dockerd and containerd: own socket, data, networks, cgroup; no iptables, no ip_forward of its own."""

    layout: Layout = field(default_factory=Layout.default)
    private: bool = True

    @property
    def client(self) -> Path:
        found = shutil.which("docker", path=_SYSTEM_PATH)
        if found is None:
            raise ClusterError("the docker command is not installed; Daemon.start() installs it")
        return Path(found)

    @property
    def env(self) -> dict[str, str]:
        return {
            "DOCKER_HOST": f"unix://{self.layout.docker_socket}",
            "DOCKER_CONFIG": str(self.layout.docker / "client"),
            "DOCKER_CONTEXT": "",
        }

    @property
    def network(self) -> HostNetwork:
        return HostNetwork(self.layout.id, self.layout.docker / "network.json")

    @property
    def running(self) -> bool:
        return daemon(self._mark("dockerd")) is not None and self._answers()

    def docker(
        self, *args: str, timeout: float = 120, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run([self.client, *args], timeout=timeout, env=self.env, check=check, stdin=stdin)

    def start(self) -> None:
        """Install Docker if there is none, make the bridge and start; does nothing when it runs."""
        with exclusive(self.layout.docker / "lock", "Docker", timeout=600):
            if self.running:
                self.network.up()
                return
            self._install()
            with step("start the private Docker daemon"):
                self._stop_programs()
                self.network.up()
                self._start_containerd()
                self._start_dockerd()

    def stop(self) -> None:
        """End both programs and take the bridge, chains and settings away; images and containers stay on disk."""
        with exclusive(self.layout.docker / "lock", "Docker", timeout=600), step("stop the private Docker daemon"):
            self._stop_programs()
            self._remove_leftovers()
            if shutil.which("iptables", path=_SYSTEM_PATH):
                self.network.down(another_docker=_another_dockerd_runs())

    def _install(self) -> None:
        wanted = ["iptables", "iproute2", "jq"]
        if shutil.which("dockerd", path=_SYSTEM_PATH) is None:
            wanted.append("docker.io")
        ensure_packages(self.layout, wanted)

    def _mark(self, program: str) -> Path:
        return self.layout.run / f"{program}.json"

    def _start_containerd(self) -> None:
        config = self.layout.docker / "containerd.toml"
        address = self.layout.run / "containerd.sock"
        write_atomically(
            config,
            f'version = 2\nroot = "{self.layout.docker}/containerd"\nstate = "{self.layout.run}/containerd"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\n  address = "{address}"\n'
            f'[debug]\n  level = "warn"\n[plugins."io.containerd.runtime.v1.linux"]\n  no_shim = false\n',
        )
        start_daemon(
            [_system("containerd"), "--config", config],
            mark=self._mark("containerd"), log=self.layout.logs / "containerd.log", env={"PATH": _SYSTEM_PATH},
        )  # fmt: skip
        wait_for("containerd's socket", address.exists, timeout=30, every=0.1)

    def _start_dockerd(self) -> None:
        network = self.network
        settings = {
            "bridge": network.bridge,
            "cgroup-parent": f"/{self._cgroup}",
            "containerd": str(self.layout.run / "containerd.sock"),
            "data-root": str(self.layout.docker / "data"),
            "default-address-pools": [{"base": str(network.pool), "size": 24}],
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "exec-root": str(self.layout.run / "docker"),
            "hosts": [self.env["DOCKER_HOST"]],
            "ip-forward": False,
            "ip-masq": False,
            "iptables": False,
            "log-level": "warn",
            "max-concurrent-downloads": 3,
            "oom-score-adjust": 0,
            "pidfile": str(self.layout.run / "docker.pid"),
            "storage-driver": "overlay2",
            **self._runtime(),
        }
        config = self.layout.docker / "dockerd.json"
        write_atomically(config, json.dumps(settings, indent=1))
        start_daemon(
            [_system("dockerd"), "--config-file", config],
            mark=self._mark("dockerd"), log=self.layout.logs / "dockerd.log", env={"PATH": _SYSTEM_PATH},
        )  # fmt: skip
        try:
            wait_for("the private Docker daemon to answer", self._answers, timeout=60)
        except ClusterError as error:
            raise ClusterError(f"{error}; see {self.layout.logs / 'dockerd.log'}") from error

    def _runtime(self) -> dict[str, object]:
        lacking = capabilities.lacking()
        if not lacking:
            return {}
        say(f"this machine cannot grant {', '.join(lacking)}: containers go without")
        wrapper = self.layout.docker / "runc"
        template = (Path(__file__).parent / "runtime-wrapper.sh").read_text()
        script = template.replace("@LACKING@", json.dumps(lacking)).replace("@RUNC@", str(_system("runc")))
        write_atomically(wrapper, script)
        wrapper.chmod(0o755)
        return {"runtimes": {"grantable": {"path": str(wrapper)}}, "default-runtime": "grantable"}

    def _answers(self) -> bool:
        argv: list[str | Path] = [self.client, "version", "--format", "{{.Server.Version}}"]
        try:
            return run(argv, timeout=10, env=self.env, check=False).returncode == 0
        except ClusterError:
            return False

    def _stop_programs(self) -> None:
        stop_daemon(self._mark("dockerd"), grace=60)
        stop_daemon(self._mark("containerd"), grace=20)

    @property
    def _cgroup(self) -> str:
        return f"sglang-rollout-{self.layout.id}"

    def _remove_leftovers(self) -> None:
        """Mounts of containers that did not end cleanly, the runtime folder, and empty control groups."""
        unmount_below(self.layout.docker)
        remove_tree(self.layout.run)
        roots = [Path("/sys/fs/cgroup"), *(path for path in Path("/sys/fs/cgroup").iterdir() if path.is_dir())]
        for root in roots:
            for folder, _, _ in os.walk(root / self._cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def _system(program: str) -> Path:
    found = shutil.which(program, path=_SYSTEM_PATH)
    if found is None:
        raise ClusterError(f"{program} is not installed; Debian's docker.io package brings it")
    return Path(found)


def _another_dockerd_runs() -> bool:
    """After ours has ended: is there one more? A zombie of ours does not count."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                name = (entry / "comm").read_text().strip()
                if name == "dockerd" and ProcessMark.of(int(entry.name)) is not None:
                    return True
    return False


def engine(layout: Layout | None = None) -> Engine:
    """The Docker to use: the user's, where it answers and can pull kind's node image; else a private one.

    The choice is remembered until `down --purge`. SGLANG_ROLLOUT_DOCKER=private or =existing makes it by hand.
    """
    layout = layout or Layout.default()
    wanted = os.environ.get("SGLANG_ROLLOUT_DOCKER", "auto")
    if wanted not in ("auto", "private", "existing"):
        raise ClusterError(f"SGLANG_ROLLOUT_DOCKER={wanted}: write private, existing or auto")
    choice = layout.docker / "choice"
    if wanted == "auto" and choice.exists():
        wanted = choice.read_text().strip()
    if wanted == "private":
        return Daemon(layout)
    found = _existing_docker()
    if wanted == "existing":
        if found is None:
            raise ClusterError("no Docker answers: start it, check DOCKER_HOST, or use SGLANG_ROLLOUT_DOCKER=private")
        return found
    usable = found is not None and can_pull(found, versions.KIND_NODE_IMAGE)
    write_atomically(choice, "existing" if usable else "private")
    return found if found is not None and usable else Daemon(layout)


def _existing_docker() -> ExistingDocker | None:
    client = shutil.which("docker")
    if client is None:
        return None
    found = ExistingDocker(Path(client))
    with contextlib.suppress(ClusterError):
        if found.docker("version", "--format", "{{.Server.Version}}", timeout=10, check=False).returncode == 0:
            return found
    return None


def has_image(docker: Engine, image: str) -> bool:
    """Does the daemon hold the image?"""
    return docker.docker("image", "inspect", image, check=False).returncode == 0


def can_pull(docker: Engine, image: str) -> bool:
    """Is the image here, or does a registry say within 20 s that it has it?"""
    if has_image(docker, image):
        return True
    with contextlib.suppress(ClusterError):
        return docker.docker("manifest", "inspect", image, timeout=20, check=False).returncode == 0
    return False
