"""The base of the node image: Debian with kind's own files, after the Dockerfile in images/base of kind's module."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from e2e.cluster import capabilities, gobuild, versions
from e2e.cluster.debian import bootstrap, pack
from e2e.cluster.docker import Engine
from e2e.cluster.layout import Layout
from e2e.cluster.process import run

PACKAGES = (
    "systemd", "conntrack", "iptables", "nftables", "iproute2", "ethtool", "util-linux", "mount", "kmod",
    "libseccomp2", "pigz", "fuse-overlayfs", "bash", "ca-certificates", "curl", "jq", "procps", "runc", "socat",
    "busybox",
)  # fmt: skip
"""Those of kind's Dockerfile, without network storage; runc and socat, which it builds; busybox for our images."""

_UNWANTED_UNITS = (
    "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
    "lib/systemd/system/multi-user.target.wants/*",
    "etc/systemd/system/*.wants/*",
    "lib/systemd/system/local-fs.target.wants/*",
    "lib/systemd/system/sockets.target.wants/*udev*",
    "lib/systemd/system/sockets.target.wants/*initctl*",
    "lib/systemd/system/basic.target.wants/*",
)
_EXECUTABLE = ("usr/local/bin", "kind/bin")


def bootstrap_rootfs(layout: Layout, root: Path, log: Path) -> None:
    """Debian with the packages of a node, in the new folder `root`."""
    bootstrap(layout, root, PACKAGES, log)


def furnish_rootfs(layout: Layout, root: Path, log: Path) -> None:
    """Make a node of the root file system; needs the containerd, crictl and CNI programs."""
    _add_kind_files(root, gobuild.module_source("sigs.k8s.io/kind", versions.KIND) / "images/base/files")
    _tame_systemd(root, log)
    _add_programs(layout, root)
    _write_cri_base(root)


def _add_kind_files(root: Path, files: Path) -> None:
    for source in sorted(path for path in files.rglob("*") if path.is_file()):
        relative = source.relative_to(files)
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if str(relative.parent) in _EXECUTABLE else 0o644)
    for folder in ("etc/kubernetes/manifests", "opt/cni/bin"):
        (root / folder).mkdir(parents=True)
    config = root / "etc/containerd/config.toml"
    config.write_text(containerd_config(config.read_text(), may_lower_oom_score=not _no_resource_capability()))


def containerd_config(text: str, *, may_lower_oom_score: bool) -> str:
    """kind's configuration with the pause image that this kubeadm wants, and OOM scores that the machine allows.

    Without CAP_SYS_RESOURCE no process may lower its oom_score_adj, which static pods ask for.
    """
    lines = []
    for line in text.splitlines():
        name = line.split("=")[0].strip()
        if name in ("sandbox_image", "sandbox"):
            line = f'{line.split("=")[0]}= "{versions.PAUSE_IMAGE}"'
        elif name == "restrict_oom_score_adj" and not may_lower_oom_score:
            line = f"{line.split('=')[0]}= true"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _no_resource_capability() -> bool:
    return "CAP_SYS_RESOURCE" in capabilities.lacking()


def _tame_systemd(root: Path, log: Path) -> None:
    for pattern in _UNWANTED_UNITS:
        for unit in root.glob(pattern):
            unit.unlink()
    with (root / "etc/systemd/journald.conf").open("a") as journald:
        journald.write("ReadKMsg=no\n")
    init = root / "sbin/init"
    init.unlink(missing_ok=True)
    init.symlink_to("/lib/systemd/systemd")
    systemctl = ["chroot", str(root), "systemctl"]
    run([*systemctl, "enable", "kubelet", "containerd", "undo-mount-hacks"], timeout=60, log=log)
    # Its registrations would be those of the whole machine.
    run([*systemctl, "mask", "systemd-binfmt"], timeout=60, log=log)


def _add_programs(layout: Layout, root: Path) -> None:
    for name in ("containerd", "ctr", "containerd-shim-runc-v2", "crictl"):
        shutil.copy2(gobuild.binary(layout, name), root / "usr/local/bin" / name)
    for name in ("host-local", "loopback", "ptp", "portmap"):
        shutil.copy2(gobuild.binary(layout, name), root / "opt/cni/bin" / name)
    (root / "usr/local/sbin").mkdir(parents=True, exist_ok=True)
    (root / "usr/local/sbin/runc").symlink_to("/usr/sbin/runc")


def _write_cri_base(root: Path) -> None:
    """The specification that every container starts from: kind's mount hook added, resource limits left to runc."""
    spec = json.loads(run(["chroot", root, "ctr", "oci", "spec"], timeout=60).stdout)
    spec.setdefault("hooks", {}).setdefault("createContainer", []).append({"path": "/kind/bin/mount-product-files.sh"})
    del spec["process"]["rlimits"]
    (root / "etc/containerd/cri-base.json").write_text(json.dumps(spec))


def import_base(docker: Engine, root: Path, name: str, log: Path) -> None:
    """Make the image `name` of the root file system."""
    layer = f"{name}-layer"
    flags = ["--change", "ENV container=docker"]
    flags += ["--change", "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    flags += ["--change", 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]']
    pack(root, [str(docker.client), "import", *flags, "-", layer], docker.env, log)
    # `docker import` knows no STOPSIGNAL; systemd ends on this one, and runs itself again on SIGTERM.
    dockerfile = f"FROM {layer}\nSTOPSIGNAL SIGRTMIN+3\n"
    docker.docker("build", "-q", "-t", name, "-", stdin=dockerfile, timeout=300)
