"""What is mounted in a folder is found, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.mounts import mounted_below, remove_tree

MOUNTINFO = r"""22 1 0:20 / /proc rw - proc proc rw
40 1 0:40 / /cache/node/rootfs/proc rw - proc proc rw
41 1 0:41 / /cache/node/rootfs/proc/sys/fs rw - proc proc rw
42 1 0:42 / /cache/node2 rw - tmpfs tmpfs rw
43 1 0:43 / /cache/node/with\040space rw - tmpfs tmpfs rw
"""


def test_mounts_below_a_folder_come_deepest_first() -> None:
    assert mounted_below(Path("/cache/node"), MOUNTINFO) == [
        "/cache/node/with space",
        "/cache/node/rootfs/proc/sys/fs",
        "/cache/node/rootfs/proc",
    ]


def test_a_tree_is_removed_and_a_missing_one_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    remove_tree(tmp_path / "a")
    remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()
