"""What the private Docker daemon needs from this machine's network: made by us, known by name, and taken away again.

The daemon itself runs without iptables: Docker rewrites chains of fixed names when it starts, which would cut the
published ports of a Docker that is already there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.process import run, write_atomically
from e2e.cluster.progress import say

CANDIDATES = tuple(map(IPv4Network, ("172.31.0.0/17", "172.30.0.0/17", "10.231.0.0/17", "10.187.0.0/17")))
_CLUSTER_RANGES = tuple(map(IPv4Network, ("10.244.0.0/16", "10.96.0.0/16")))
"""kind's default pod and Service ranges."""

FORWARDING = "net/ipv4/ip_forward"
SYSCTLS = (
    FORWARDING,
    "fs/file-max",
    "fs/nr_open",
    "fs/protected_fifos",
    "fs/protected_hardlinks",
    "fs/protected_regular",
    "fs/protected_symlinks",
    "kernel/core_uses_pid",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/pid_max",
    "kernel/sysrq",
    "vm/overcommit_memory",
)
"""Settings of the whole machine: forwarding is changed by us, the others by systemd and kubelet in the nodes."""
_PROC = Path("/proc/sys")


def choose_range(in_use: Iterable[IPv4Network]) -> IPv4Network:
    """The first candidate that overlaps neither a route of this machine nor the cluster's own ranges."""
    taken = [*in_use, *_CLUSTER_RANGES]
    for candidate in CANDIDATES:
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    tried = ", ".join(map(str, CANDIDATES))
    raise ClusterError(f"no free address range for the nodes: routes of this machine overlap each of {tried}")


def routed_networks(routes: str) -> list[IPv4Network]:
    """Networks in what `ip -j -4 route show table all` prints, the default route aside."""
    found = []
    for route in json.loads(routes or "[]"):
        target = route.get("dst", "default")
        if target != "default":
            found.append(IPv4Network(target, strict=False))
    return found


def bridges_within(addresses: str, network: IPv4Network) -> list[str]:
    """Bridges with an address in `network`, in what `ip -j -4 addr show type bridge` prints: ours, and Docker's."""
    return [
        link["ifname"]
        for link in json.loads(addresses or "[]")
        if any(IPv4Address(one["local"]) in network for one in link.get("addr_info", []))
    ]


@dataclass(frozen=True)
class HostNetwork:
    """The bridge, two chains and the forwarding switch of one private daemon; `record` remembers what was before."""

    id: str
    record: Path

    @property
    def bridge(self) -> str:
        return f"sglr{self.id}"

    @property
    def chain(self) -> str:
        return f"SGLANG-ROLLOUT-{self.id}"

    @property
    def range(self) -> IPv4Network:
        """The range that was chosen by `up`."""
        return IPv4Network(self._recorded()["range"])

    @property
    def pool(self) -> IPv4Network:
        """The half from which Docker takes networks."""
        return next(self.range.subnets(prefixlen_diff=1))

    @property
    def bridge_network(self) -> IPv4Network:
        """The last /24, for the default network (`docker build`, `docker run`)."""
        return list(self.range.subnets(new_prefix=24))[-1]

    def up(self) -> None:
        """Make what is missing; safe to call again, also after a reboot."""
        if not self.record.exists():
            routes = run(["ip", "-j", "-4", "route", "show", "table", "all"], timeout=10).stdout
            chosen = choose_range(routed_networks(routes))
            write_atomically(self.record, json.dumps({"range": str(chosen), "before": _settings()}, indent=1))
        if not Path("/sys/class/net", self.bridge).exists():
            run(["ip", "link", "add", self.bridge, "type", "bridge"], timeout=10)
        address = f"{self.bridge_network.network_address + 1}/{self.bridge_network.prefixlen}"
        run(["ip", "addr", "replace", address, "dev", self.bridge], timeout=10)
        run(["ip", "link", "set", self.bridge, "up"], timeout=10)
        (_PROC / FORWARDING).write_text("1")
        for table, hook, rules in self._rules():
            _iptables(table, "-N", self.chain, check=False)
            _iptables(table, "-F", self.chain)
            for rule in rules:
                _iptables(table, "-A", self.chain, *rule)
            if not _iptables(table, "-C", hook, "-j", self.chain, check=False):
                _iptables(table, "-I", hook, "1", "-j", self.chain)

    def _rules(self) -> list[tuple[str, str, list[list[str]]]]:
        ours = str(self.range)
        answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
        return [
            ("filter", "FORWARD", [["-s", ours, "-j", "ACCEPT"], ["-d", ours, *answers, "-j", "ACCEPT"]]),
            ("nat", "POSTROUTING", [["-s", ours, "!", "-d", ours, "-j", "MASQUERADE"]]),
        ]

    def down(self, *, another_docker: bool) -> None:
        """Take all of it away; forwarding stays on when `another_docker` depends on it."""
        for table, hook in (("filter", "FORWARD"), ("nat", "POSTROUTING")):
            while _iptables(table, "-D", hook, "-j", self.chain, check=False):
                pass
            _iptables(table, "-F", self.chain, check=False)
            _iptables(table, "-X", self.chain, check=False)
        if not self.record.exists():
            return
        bridges = run(["ip", "-j", "-4", "addr", "show", "type", "bridge"], timeout=10).stdout
        for bridge in bridges_within(bridges, self.range):
            run(["ip", "link", "del", bridge], timeout=10)
        for name, value in to_restore(self._recorded()["before"], _settings(), another_docker=another_docker).items():
            (_PROC / name).write_text(value)
        self.record.unlink()

    def _recorded(self) -> dict[str, dict[str, str]]:
        if not self.record.exists():
            raise ClusterError("the private Docker daemon's network is not up")
        recorded: dict[str, dict[str, str]] = json.loads(self.record.read_text())
        return recorded


def to_restore(before: dict[str, str], now: dict[str, str], *, another_docker: bool) -> dict[str, str]:
    """Settings to write back. Forwarding stays on when another Docker runs here by now: it would be cut off."""
    changed = {name: value for name, value in before.items() if name in now and now[name] != value}
    if another_docker and changed.get(FORWARDING) == "0":
        say("another Docker runs here: IP forwarding stays on")
        del changed[FORWARDING]
    return changed


def _settings() -> dict[str, str]:
    return {name: (_PROC / name).read_text().strip() for name in SYSCTLS if (_PROC / name).exists()}


def _iptables(table: str, *rule: str, check: bool = True) -> bool:
    result = run(["iptables", "-w", "10", "-t", table, *rule], timeout=20, check=check)
    return result.returncode == 0
