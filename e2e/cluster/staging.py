"""Folders that become images: our static binaries, or programs of a Debian root file system with what they load."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.process import run

_LIBRARY = re.compile(r"/\S+\.so\S*")
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
"""Debian's merged /usr: these are links in every root."""
_IPTABLES_NAMES = ("iptables", "iptables-save", "iptables-restore")
_XTABLES = "usr/lib/x86_64-linux-gnu/xtables"


@dataclass(frozen=True)
class Stage:
    """One image's folder in the making."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Stage:
        """A new root: merged /usr, /tmp, and the user root."""
        for link, target in _MERGED.items():
            (root / target).mkdir(parents=True)
            (root / link).symlink_to(target)
        for folder in ("tmp", "etc", "usr/local/bin"):
            (root / folder).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\n")
        (root / "etc/group").write_text("root:x:0:\n")
        return cls(root)

    def add_static(self, *binaries: Path) -> Stage:
        """Put static binaries on the PATH."""
        for binary in binaries:
            shutil.copy2(binary, self.root / "usr/local/bin" / binary.name)
        return self

    def add_debian(self, rootfs: Path, paths: Iterable[str]) -> Stage:
        """Copy files of a Debian root, each with the libraries that the loader would look for."""
        for path in paths:
            self._copy(rootfs, path)
            libraries = run(["chroot", rootfs, "ldd", f"/{path}"], timeout=30, check=False).stdout
            for library in _LIBRARY.findall(libraries):
                self._copy(rootfs, library.lstrip("/"))
        return self

    def add_network_tools(self, rootfs: Path) -> Stage:
        """iptables (the nft variant) with its extensions, nft and ip."""
        extensions = [f"{_XTABLES}/{path.name}" for path in sorted((rootfs / _XTABLES).glob("*.so"))]
        self.add_debian(rootfs, ["usr/sbin/xtables-nft-multi", "usr/sbin/nft", "usr/bin/ip", *extensions])
        for name in _IPTABLES_NAMES:
            for spelling in (name, name.replace("ip", "ip6", 1)):
                self._link(f"usr/sbin/{spelling}", "xtables-nft-multi")
        return self

    def add_busybox(self, rootfs: Path) -> Stage:
        """busybox under all the names it knows, able to resolve host names."""
        loaded = [f"usr/lib/x86_64-linux-gnu/libnss_{kind}.so.2" for kind in ("dns", "files")]
        self.add_debian(rootfs, ["usr/bin/busybox", *loaded])
        names = run(["chroot", rootfs, "/usr/bin/busybox", "--list"], timeout=30).stdout.split()
        for name in names:
            if name != "busybox":
                self._link(f"usr/bin/{name}", "busybox")
        (self.root / "etc/nsswitch.conf").write_text("hosts: files dns\n")
        return self

    def _copy(self, rootfs: Path, path: str) -> None:
        target = self.root / path
        if target.exists():
            return
        # Links in the root are absolute there, so they are followed from inside.
        real = run(["chroot", rootfs, "readlink", "-e", f"/{path}"], timeout=30).stdout.strip()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(rootfs / real.lstrip("/"), target)

    def _link(self, path: str, to: str) -> None:
        link = self.root / path
        if not link.is_symlink() and not link.exists():
            link.symlink_to(to)
