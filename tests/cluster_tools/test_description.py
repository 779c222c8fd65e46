"""What the tools derive from versions, from this machine and from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.cluster import gobuild, versions
from e2e.cluster.capabilities import lacking
from e2e.cluster.cluster import Cluster, CurrentCluster, open_cluster
from e2e.cluster.debian import pick_mirrors, sources
from e2e.cluster.docker import Daemon, ExistingDocker, engine
from e2e.cluster.errors import ClusterError
from e2e.cluster.kind import NODES, ROLES, Mount, describe, mounts_of, same_description
from e2e.cluster.layout import Layout
from e2e.cluster.node_base import containerd_config
from e2e.cluster.nodes import images_and_archives, node_name


def test_every_program_is_pinned_in_a_folder_of_its_version() -> None:
    for program in gobuild.PROGRAMS.values():
        path = gobuild.binary(Layout(Path("/cache")), program.name)
        assert path.parent.name.endswith(program.version)
        if program.module:
            text = (gobuild.MODULES / program.module / "go.mod").read_text()
            root = program.package.split("/cmd/")[0]
            assert root == "." or f"{root} {program.version}" in text


@pytest.mark.parametrize(("text", "version"), [("go version go1.26.8 linux/amd64", (1, 26)), ("go1.9rc1", (1, 9))])
def test_go_version_is_read(text: str, version: tuple[int, int]) -> None:
    assert gobuild.go_version(text) == version


def test_kind_configuration_round_trips_its_mounts() -> None:
    mounts = [Mount("/b", "/opt/b"), Mount("/a", "/opt/a")]
    text = describe("fleet", "node:1", mounts)
    document = yaml.safe_load(text)
    assert [node["role"] for node in document["nodes"]] == list(ROLES)
    assert {node["image"] for node in document["nodes"]} == {"node:1"}
    assert all(mount["readOnly"] for node in document["nodes"] for mount in node["extraMounts"])
    assert mounts_of(text) == sorted(mounts)
    assert text == describe("fleet", "node:1", mounts[::-1])
    assert mounts_of(describe("fleet", "node:1", [])) == []
    assert same_description(text, describe("fleet", "node:1", mounts))
    assert not same_description(text, describe("fleet", "node:2", mounts))
    assert not same_description("", text)


@pytest.mark.parametrize("text", ["/a", "a:/b", "/a:b", ""])
def test_a_mount_needs_two_absolute_paths(text: str) -> None:
    with pytest.raises(ClusterError, match="HOST:NODE"):
        Mount.parse(text)


@pytest.mark.parametrize("given", ["worker2", "fleet-worker2"])
def test_a_node_has_a_short_name(given: str) -> None:
    assert node_name("fleet", given) == "fleet-worker2"


def test_an_unknown_node_is_refused_with_the_names() -> None:
    with pytest.raises(ClusterError, match=", ".join(NODES)):
        node_name("fleet", "worker9")


def test_archives_and_references_are_told_apart() -> None:
    assert images_and_archives(["a/b:1", "x.tar", "c"]) == (["a/b:1", "c"], ["x.tar"])


@pytest.mark.parametrize(
    ("mask", "names"),
    [("000001ffffffffff", []), ("000001fffeffffff", ["CAP_SYS_RESOURCE"]), ("0000017fffffffff", ["CAP_BPF"])],
)
def test_lacking_capabilities_are_named(mask: str, names: list[str]) -> None:
    found = lacking(f"Name:\tx\nCapBnd:\t{mask}\n")
    assert found == names


TARGETS = """http://archive.example/debian bookworm
http://archive.example/debian bookworm-updates
http://security.example/debian-security bookworm-security
https://other.example/apt cloud-sdk-bookworm
"""


def test_mirrors_of_this_machine_are_used() -> None:
    archive, security = pick_mirrors(TARGETS, "bookworm")
    assert (archive, security) == ("http://archive.example/debian", "http://security.example/debian-security")
    assert "deb http://security.example/debian-security bookworm-security main" in sources(archive, security)
    assert "security" not in sources(archive, None)


def test_another_suite_is_refused() -> None:
    with pytest.raises(ClusterError, match="no archive for Debian bookworm"):
        pick_mirrors("http://archive.example/debian trixie\n", "bookworm")


CONTAINERD = """  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "registry.example/pause:3.10"
  [plugins."io.containerd.cri.v1.runtime"]
    restrict_oom_score_adj = false
"""


def test_containerd_uses_kubeadms_pause_image_and_respects_the_machine() -> None:
    allowed = containerd_config(CONTAINERD, may_lower_oom_score=True)
    assert f'    sandbox = "{versions.PAUSE_IMAGE}"' in allowed.splitlines()
    assert "restrict_oom_score_adj = false" in allowed
    assert "restrict_oom_score_adj = true" in containerd_config(CONTAINERD, may_lower_oom_score=False)


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_ROLLOUT_CACHE", str(tmp_path))
    assert Layout.default().bin.is_relative_to(tmp_path)
    monkeypatch.delenv("SGLANG_ROLLOUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert Layout.default().root == Path("/xdg/sglang-rollout")
    assert len(str(Layout.default().docker_socket)) < 100


def test_docker_can_be_chosen_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    monkeypatch.setenv("SGLANG_ROLLOUT_DOCKER", "private")
    assert engine(layout) == Daemon(layout)
    monkeypatch.setenv("SGLANG_ROLLOUT_DOCKER", "podman")
    with pytest.raises(ClusterError, match="write private, existing or auto"):
        engine(layout)


def _fake_docker(folder: Path, *, has_image: bool) -> None:
    """A docker command whose daemon answers, and whose registry has the image or not."""
    script = folder / "docker"
    code = 0 if has_image else 1
    script.write_text(f'#!/bin/sh\ncase "$1" in version) echo 99 ;; image) exit 1 ;; manifest) exit {code} ;; esac\n')
    script.chmod(0o755)


@pytest.mark.parametrize("has_image", [True, False])
def test_the_users_docker_is_used_only_where_it_can_pull(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_image: bool
) -> None:
    _fake_docker(tmp_path, has_image=has_image)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SGLANG_ROLLOUT_DOCKER", raising=False)
    layout = Layout(tmp_path / "cache")
    chosen = engine(layout)
    assert isinstance(chosen, ExistingDocker if has_image else Daemon)
    (tmp_path / "docker").unlink()
    remembered = (layout.docker / "choice").read_text()
    assert remembered == ("existing" if has_image else "private")


def test_current_cluster_starts_nothing_and_refuses_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("")
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setenv("KUBECONFIG", str(config))
    cluster = open_cluster()
    assert isinstance(cluster, CurrentCluster)
    assert cluster.kubeconfig == config
    with pytest.raises(ClusterError, match="docker push agent:1"):
        cluster.load("agent:1")
    with pytest.raises(ClusterError, match="left alone"):
        cluster.node_stop("worker")


def test_current_cluster_needs_a_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLUSTER", "current")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match="set KUBECONFIG"):
        _ = open_cluster().kubeconfig


def test_cluster_choice_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "moon")
    with pytest.raises(ClusterError, match="write current, or local"):
        open_cluster()
    monkeypatch.delenv("CLUSTER")
    assert type(open_cluster()) is Cluster
