"""The front's configuration and the flags of smg: what they must always and may never hold."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import pytest

from sglang_rollout.router.front import MAX_CONNECTIONS, MAX_THREADS, Front, key_digests
from sglang_rollout.router.gateway import OWNED, UnusableArgument, defaults, owned, refuse_unusable
from sglang_rollout.router.launch import CannotStart, ClientKeys
from sglang_rollout.router.settings import FRONT_KEYS, RouterSettings


def configuration(digests: Path | None = None, open_files: int = 1_000_000, processors: int = 8) -> list[str]:
    text = Front("*:30000", 30003, digests, open_files, processors).configuration()
    return [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize("digests", [None, Path("/run/keys")])
def test_authorization_is_always_taken_away(digests: Path | None) -> None:
    assert "http-request del-header Authorization" in configuration(digests)


def test_the_key_is_checked_before_the_header_goes() -> None:
    lines = configuration(Path("/run/keys"))
    check = next(number for number, line in enumerate(lines) if line.startswith("http-request return status 401"))
    assert check < lines.index("http-request del-header Authorization")
    assert not any("401" in line for line in configuration())


@pytest.mark.parametrize(("open_files", "connections"), [(1024, 384), (1_000_000, MAX_CONNECTIONS), (100, 64)])
def test_connections_fit_the_open_files(open_files: int, connections: int) -> None:
    assert f"maxconn {connections}" in configuration(open_files=open_files)


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 2), (128, MAX_THREADS)])
def test_threads_stay_few(processors: int, threads: int) -> None:
    assert f"nbthread {threads}" in configuration(processors=processors)


def test_each_line_is_a_key() -> None:
    digests = key_digests("one\n\n two \n").split()
    assert digests == [hashlib.sha256(f"Bearer {key}".encode()).hexdigest().upper() for key in ("one", "two")]
    assert key_digests("\n \n") == ""


def test_a_changed_key_is_noticed_and_a_lost_one_is_told(tmp_path: Path) -> None:
    source = tmp_path / "api-key"
    keys = ClientKeys(RouterSettings(tmp_path, source, None))
    with pytest.raises(CannotStart, match="cannot be read"):
        keys.refresh()
    source.write_text("\n")
    with pytest.raises(CannotStart, match="is empty"):
        keys.refresh()
    source.write_text("first")
    assert keys.refresh()
    assert not keys.refresh()
    source.write_text("second")
    assert keys.refresh()
    assert (tmp_path / FRONT_KEYS).read_text() == key_digests("second")


def test_without_auth_there_are_no_keys(tmp_path: Path) -> None:
    assert not ClientKeys(RouterSettings(tmp_path, None, None)).refresh()
    assert not (tmp_path / FRONT_KEYS).exists()


def parse(arguments: list[str]) -> argparse.Namespace:
    """A parser as smg's is: argparse with abbreviations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", default="cache_aware")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--request-timeout-secs", type=int, default=1800)
    parser.add_argument("--enable-rl", action="store_true")
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--enable-rl"], "--enable-rl"),
        (["--request-timeout-s=1"], "--request-timeout-secs"),
        (["--policy", "power_of_two"], "use least_load"),
    ],
)
def test_what_cannot_be_used_is_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(UnusableArgument, match=says):
        refuse_unusable(arguments, parse)


def test_other_arguments_are_taken() -> None:
    refuse_unusable(["--policy=round_robin", "--log-level=debug"], parse)


def test_every_owned_flag_is_protected() -> None:
    names = {
        flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        for flag in owned("key", 1, 2)
        if flag[:2] == "--"
    }
    assert names <= set(OWNED)


@pytest.mark.parametrize("drain", [None, 50])
def test_the_drain_time_is_handed_on(drain: int | None) -> None:
    flags = defaults(drain)
    assert ("--shutdown-grace-period-secs" in flags) == (drain is not None)
    assert (str(drain) in flags) == (drain is not None)
