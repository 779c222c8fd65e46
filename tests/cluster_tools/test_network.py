"""The nodes' address range never overlaps what this machine already routes."""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from e2e.cluster.errors import ClusterError
from e2e.cluster.host_network import CANDIDATES, HostNetwork, bridges_within, choose_range, routed_networks, to_restore


def test_first_range_is_taken_on_an_empty_machine() -> None:
    assert choose_range([]) == CANDIDATES[0]


@pytest.mark.parametrize("routed", ["172.31.16.0/20", "172.16.0.0/12", "172.31.5.7/32"])
def test_an_overlapping_route_moves_the_range(routed: str) -> None:
    chosen = choose_range([IPv4Network(routed)])
    assert not chosen.overlaps(IPv4Network(routed))


def test_no_range_left_says_so() -> None:
    with pytest.raises(ClusterError, match="no free address range"):
        choose_range([IPv4Network("172.16.0.0/12"), IPv4Network("10.0.0.0/8")])


def test_routes_are_read_without_the_default_route() -> None:
    printed = json.dumps([{"dst": "default"}, {"dst": "192.0.2.0/24"}, {"dst": "192.0.2.7", "type": "local"}])
    assert routed_networks(printed) == [IPv4Network("192.0.2.0/24"), IPv4Network("192.0.2.7/32")]
    assert routed_networks("") == []


def test_names_fit_the_kernel_and_iptables(tmp_path: Path) -> None:
    network = HostNetwork("0a1b2c", tmp_path / "network.json")
    assert len(network.bridge) <= 15
    assert len(network.chain) <= 28


def test_bridge_and_pool_share_the_range_but_do_not_overlap(tmp_path: Path) -> None:
    record = tmp_path / "network.json"
    record.write_text(json.dumps({"range": "172.31.0.0/17", "before": {}}))
    network = HostNetwork("0a1b2c", record)
    assert network.pool.subnet_of(network.range)
    assert network.bridge_network.subnet_of(network.range)
    assert not network.pool.overlaps(network.bridge_network)


def test_only_bridges_of_our_range_are_taken_away() -> None:
    addresses = [("br-0123", "172.31.3.1"), ("docker0", "172.17.0.1"), ("sglr0a1b2c", "172.31.127.1")]
    printed = json.dumps([{"ifname": name, "addr_info": [{"local": local}]} for name, local in addresses] + [{}])
    assert bridges_within(printed, IPv4Network("172.31.0.0/17")) == ["br-0123", "sglr0a1b2c"]
    assert bridges_within("", IPv4Network("172.31.0.0/17")) == []


@pytest.mark.parametrize(
    ("before", "now", "another_docker", "restored"),
    [
        ("0", "1", False, {"net/ipv4/ip_forward": "0"}),
        ("0", "1", True, {}),
        ("1", "1", False, {}),
        ("1", "0", True, {"net/ipv4/ip_forward": "1"}),
    ],
)
def test_forwarding_is_put_back_unless_another_docker_needs_it(
    before: str, now: str, restored: dict[str, str], *, another_docker: bool
) -> None:
    name = "net/ipv4/ip_forward"
    assert to_restore({name: before}, {name: now}, another_docker=another_docker) == restored


def test_only_changed_settings_are_put_back() -> None:
    before = {"kernel/panic": "1", "fs/file-max": "10", "gone/now": "3"}
    now = {"kernel/panic": "10", "fs/file-max": "10"}
    assert to_restore(before, now, another_docker=False) == {"kernel/panic": "1"}
