"""The cluster's programs, built static from the Go module proxy, once for each version."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import versions
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.process import run
from e2e.cluster.progress import step

MODULES = Path(__file__).parent / "gomods"
"""go.mod and go.sum for modules that `go install` refuses, because their own go.mod has replace directives."""

_COMPONENT = "k8s.io/component-base/version"
_major, _minor, _ = versions.KUBERNETES.removeprefix("v").split(".")
_KUBERNETES_FLAGS = " ".join(
    f"-X {_COMPONENT}.{name}={value}"
    for name, value in (
        ("gitVersion", versions.KUBERNETES),
        ("gitMajor", _major),
        ("gitMinor", _minor),
        ("gitTreeState", "clean"),
    )
)
_CONTAINERD = "github.com/containerd/containerd/v2"
_CNI = "github.com/containernetworking/plugins/plugins"


@dataclass(frozen=True)
class Program:
    """One program: its package, and either the version to install or the folder below gomods that pins it."""

    name: str
    package: str
    version: str
    module: str | None = None
    link_flags: str = ""
    family: str = ""

    @property
    def folder(self) -> str:
        return f"{self.family or self.name}-{self.version}"


def _kubernetes(name: str) -> Program:
    package = f"k8s.io/kubernetes/cmd/{name}"
    return Program(name, package, versions.KUBERNETES, "kubernetes", _KUBERNETES_FLAGS, "kubernetes")


def _containerd(name: str) -> Program:
    flags = f"-X {_CONTAINERD}/version.Version={versions.CONTAINERD}"
    package = f"{_CONTAINERD}/cmd/{name}"
    return Program(name, package, versions.CONTAINERD, "containerd", flags, "containerd")


def _cni(kind: str, name: str) -> Program:
    return Program(name, f"{_CNI}/{kind}/{name}", versions.CNI_PLUGINS, family="cni")


_CRICTL_FLAGS = f"-X sigs.k8s.io/cri-tools/pkg/version.Version={versions.CRICTL}"
_HELM_FLAGS = f"-X helm.sh/helm/v3/internal/version.version={versions.HELM}"
_LOCAL_PATH = "github.com/rancher/local-path-provisioner"
KINDNETD_VERSION = "1"
"""Of our stand-in; raise it with every change of gomods/kindnetd."""

API_SERVER = (
    Program("etcd", "go.etcd.io/etcd/server/v3", versions.ETCD, "etcd"),
    _kubernetes("kube-apiserver"),
    _kubernetes("kubectl"),
)
"""Enough for `ApiServer`."""

COMMANDS = (
    Program("helm", "helm.sh/helm/v3/cmd/helm", versions.HELM, link_flags=_HELM_FLAGS),
    Program("kind", "sigs.k8s.io/kind", versions.KIND),
)
"""What a person runs, beside kubectl."""

NODE = (
    _kubernetes("kubeadm"),
    _kubernetes("kubelet"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kube-proxy"),
    _containerd("containerd"),
    _containerd("ctr"),
    _containerd("containerd-shim-runc-v2"),
    _cni("ipam", "host-local"),
    _cni("main", "loopback"),
    _cni("main", "ptp"),
    _cni("meta", "portmap"),
    Program("crictl", "sigs.k8s.io/cri-tools/cmd/crictl", versions.CRICTL, link_flags=_CRICTL_FLAGS),
    Program("coredns", "github.com/coredns/coredns", versions.COREDNS),
    Program("local-path-provisioner", _LOCAL_PATH, versions.LOCAL_PATH_PROVISIONER),
    Program("kindnetd", ".", KINDNETD_VERSION, "kindnetd"),
)
"""What goes into a node image that is built here."""

PROGRAMS = {program.name: program for program in (*API_SERVER, *COMMANDS, *NODE)}


def binary(layout: Layout, name: str) -> Path:
    """Where the program `name` is, or will be."""
    return layout.bin / PROGRAMS[name].folder / name


def build(layout: Layout, programs: Iterable[Program]) -> None:
    """Build what is not there yet. A build that breaks leaves nothing that looks done."""
    missing = [program for program in programs if not binary(layout, program.name).exists()]
    if missing:
        go = _go()
        for program in missing:
            target = binary(layout, program.name)
            title = f"build {program.name} {program.version}"
            with exclusive(target.parent / f".{program.name}.lock", title, timeout=3600):
                if not target.exists():
                    with step(title):
                        _build(layout, go, program)


def _build(layout: Layout, go: str, program: Program) -> None:
    target = binary(layout, program.name)
    scratch = target.parent / f".build-{program.name}"
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed
    scratch.mkdir(parents=True)
    log = layout.logs / f"go-{program.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    flags = ["-trimpath", "-ldflags", f"-s -w {program.link_flags}".strip()]
    env = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": f"-buildvcs=false -p={_jobs()}"}
    try:
        if program.module is None:
            argv = [go, "install", *flags, f"{program.package}@{program.version}"]
            run(["nice", *argv], timeout=3600, env={**env, "GOBIN": str(scratch)}, cwd=scratch, log=log)
        else:
            argv = [go, "build", "-mod=readonly", *flags, "-o", str(scratch / program.name), program.package]
            run(["nice", *argv], timeout=3600, env=env, cwd=MODULES / program.module, log=log)
        (scratch / program.name).rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def module_source(module: str, version: str) -> Path:
    """The folder of a module's unpacked source, fetched if need be."""
    with tempfile.TemporaryDirectory() as nowhere:
        argv = [_go(), "mod", "download", "-json", f"{module}@{version}"]
        env = {"GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": ""}
        answer = run(argv, timeout=600, env=env, cwd=Path(nowhere)).stdout
    return Path(json.loads(answer)["Dir"])


def _jobs() -> int:
    return os.cpu_count() or 2


def _go() -> str:
    go = shutil.which(os.environ.get("GO", "go"))
    wanted = ".".join(map(str, versions.GO_MINIMUM))
    if go is None:
        raise ClusterError(f"Go is not installed: put Go {wanted} or newer on PATH, or name it in GO")
    found = go_version(run([go, "version"], timeout=30, env={"GOTOOLCHAIN": "local"}).stdout)
    if found < versions.GO_MINIMUM:
        raise ClusterError(f"{go} is Go {'.'.join(map(str, found))}: Go {wanted} or newer is needed; name one in GO")
    return go


def go_version(text: str) -> tuple[int, int]:
    """Major and minor in what `go version` prints."""
    match = re.search(r"go(\d+)\.(\d+)", text)
    if match is None:
        raise ClusterError(f"cannot read a version in what `go version` printed: {text!r}")
    return int(match[1]), int(match[2])
