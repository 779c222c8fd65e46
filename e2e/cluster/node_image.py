"""The image of a kind node: kind's own where it can be pulled, else built here with `kind build node-image`."""

from __future__ import annotations

import hashlib
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.cluster import gobuild, versions
from e2e.cluster.archive import ImageSource, write_archive
from e2e.cluster.debian import ensure_packages
from e2e.cluster.docker import Engine, can_pull, has_image
from e2e.cluster.layout import Layout
from e2e.cluster.lock import exclusive
from e2e.cluster.mounts import remove_tree
from e2e.cluster.node_base import bootstrap_rootfs, furnish_rootfs, import_base
from e2e.cluster.process import run
from e2e.cluster.progress import step
from e2e.cluster.staging import Stage

PROBE = "sglang-rollout/probe:1"
"""busybox, for `verify`; docker calls it this whichever way it came here."""
_PROBE_ARCHIVE = "probe.tar"
_RECIPE = ("archive.py", "staging.py", "node_base.py", "node_image.py", "versions.py", "gomods/kindnetd/main.go")


def ensure_node_image(docker: Engine, layout: Layout) -> str:
    """Make the node image and the probe image present in the daemon; returns the name of the node image."""
    if not docker.private and can_pull(docker, versions.KIND_NODE_IMAGE):
        return _pull(docker)
    name = f"sglang-rollout/node:{versions.KUBERNETES}-{recipe_key()}"
    with exclusive(layout.images / "node.lock", f"image {name}", timeout=3600):
        if has_image(docker, name) and has_image(docker, PROBE):
            return name
        ensure_packages(layout, ["debootstrap", "gcc", "libc6-dev"])
        work = layout.images / "node"
        remove_tree(work)
        work.mkdir(parents=True)
        try:
            _make(docker, layout, work, name)
        finally:
            remove_tree(work)
    return name


def recipe_key() -> str:
    """Changes with the versions and with this recipe."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"\0".join((here / name).read_bytes() for name in _RECIPE))
    return digest.hexdigest()[:8]


def _pull(docker: Engine) -> str:
    for image in (versions.KIND_NODE_IMAGE, versions.PROBE_IMAGE):
        if not has_image(docker, image):
            with step(f"pull {image}"):
                docker.docker("pull", image, timeout=1200)
    docker.docker("tag", versions.PROBE_IMAGE, PROBE)
    return versions.KIND_NODE_IMAGE


def _make(docker: Engine, layout: Layout, work: Path, name: str) -> None:
    log = layout.logs / "node-image.log"
    log.unlink(missing_ok=True)
    root = work / "rootfs"
    # Packages come from the network while the compilers have the processors.
    with ThreadPoolExecutor(max_workers=1) as pool:
        bootstrapped = pool.submit(bootstrap_rootfs, layout, root, log)
        gobuild.build(layout, gobuild.PROGRAMS.values())
        with step("make the node's root file system"):
            bootstrapped.result()
            furnish_rootfs(layout, root, log)
    base = f"sglang-rollout/node-base:{recipe_key()}"
    with step("import the node's root file system"):
        import_base(docker, root, base, log)
    with step("make the images of the control plane"):
        release = _write_release(layout, work, root)
        docker.docker("load", "-q", "-i", str(work / _PROBE_ARCHIVE), timeout=120)
    with step(f"kind build node-image {versions.KUBERNETES}"):
        scratch = work / "tmp"
        scratch.mkdir()
        env = {**kind_environment(docker), "TMPDIR": str(scratch)}
        argv = ["build", "node-image", "--type=file", f"--base-image={base}", f"--image={name}", str(release)]
        run([gobuild.binary(layout, "kind"), *argv], timeout=1200, env=env, log=log)


def kind_environment(docker: Engine) -> dict[str, str]:
    """kind calls `docker` by name: the first one on the PATH must be the daemon's own client."""
    path = f"{docker.client.parent}:{os.environ.get('PATH', '')}"
    return {**docker.env, "PATH": path, "KIND_EXPERIMENTAL_PROVIDER": "docker"}


def _write_release(layout: Layout, work: Path, rootfs: Path) -> Path:
    """A tarball in the layout of a Kubernetes release, which kind builds from."""
    archives = work / "archives"
    archives.mkdir()
    groups, probe = _images(layout, work / "stages", rootfs)
    for name, images in groups.items():
        write_archive(archives / f"{name}.tar", images)
    write_archive(work / _PROBE_ARCHIVE, [probe])
    release = work / "kubernetes-server-linux-amd64.tar.gz"
    with tarfile.open(release, "w:gz", compresslevel=1) as tar:
        version = work / "version"
        version.write_text(versions.KUBERNETES)
        tar.add(version, "kubernetes/version")
        for name in groups:
            tar.add(archives / f"{name}.tar", f"kubernetes/server/bin/{name}.tar")
        for name in ("kubeadm", "kubelet", "kubectl"):
            tar.add(gobuild.binary(layout, name), f"kubernetes/server/bin/{name}")
    return release


def _images(layout: Layout, stages: Path, rootfs: Path) -> tuple[dict[str, list[ImageSource]], ImageSource]:
    """The images of each archive that kind expects, and the probe image.

    kind pulls what kubeadm and its manifests name unless one of these four archives has it, so the rest rides along
    with the scheduler.
    """

    def stage(name: str) -> Stage:
        return Stage.create(stages / name)

    def ours(name: str, image: str, *, entrypoint: bool = True) -> ImageSource:
        root = stage(name).add_static(gobuild.binary(layout, name)).root
        return ImageSource(image, root, (f"/usr/local/bin/{name}",) if entrypoint else ())

    def core(name: str) -> ImageSource:
        return ours(name, f"{versions.KUBERNETES_REGISTRY}/{name}:{versions.KUBERNETES}", entrypoint=False)

    proxy = stage("kube-proxy").add_network_tools(rootfs).add_static(gobuild.binary(layout, "kube-proxy"))
    kindnetd = stage("kindnetd").add_network_tools(rootfs).add_static(gobuild.binary(layout, "kindnetd"))
    busybox = stage("busybox").add_busybox(rootfs)
    pause = stages / "pause"
    _compile_pause(pause)
    proxy_name = f"{versions.KUBERNETES_REGISTRY}/kube-proxy:{versions.KUBERNETES}"
    groups = {
        "kube-apiserver": [core("kube-apiserver")],
        "kube-controller-manager": [core("kube-controller-manager")],
        "kube-proxy": [ImageSource(proxy_name, proxy.root)],
        "kube-scheduler": [
            core("kube-scheduler"),
            ours("etcd", versions.ETCD_IMAGE, entrypoint=False),
            ours("coredns", versions.COREDNS_IMAGE),
            ImageSource(versions.PAUSE_IMAGE, pause, ("/pause",)),
            ImageSource(versions.KINDNETD_IMAGE, kindnetd.root, ("/usr/local/bin/kindnetd",)),
            ours("local-path-provisioner", versions.LOCAL_PATH_IMAGE),
            ImageSource(versions.LOCAL_PATH_HELPER_IMAGE, busybox.root, command=("sh",)),
        ],
    }
    return groups, ImageSource(PROBE, busybox.root, command=("sh",))


def _compile_pause(root: Path) -> None:
    """The process that holds a pod's namespaces: Kubernetes' own source, one C file."""
    root.mkdir(parents=True)
    source = gobuild.module_source("k8s.io/kubernetes", versions.KUBERNETES) / "build/pause/linux/pause.c"
    argv: list[str | Path] = [
        "gcc",
        "-Os",
        "-static",
        "-s",
        f"-DVERSION=v{versions.PAUSE}",
        "-o",
        root / "pause",
        source,
    ]
    run(argv, timeout=120)
