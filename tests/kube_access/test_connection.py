"""What answers mean, and how a fleet is followed when the API server is not well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sglang_rollout.kube_access.cluster import Cluster
from sglang_rollout.kube_access.connection import connect, failure_of
from sglang_rollout.kube_access.failures import Conflict, Expired, Failure, Forbidden, NotFound, Refused, Unreachable
from tests.api.objects import Object
from tests.kube_access.fake_connection import Clock, FakeConnection, fleet, not_found


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (404, {"message": 'sglangrollouts "x" not found', "details": {"name": "x"}}, NotFound, '"x" not found'),
        (404, {"message": "the server could not find the requested resource"}, NotFound, "is the operator installed"),
        (401, {"message": "Unauthorized"}, Forbidden, "log in again"),
        (403, {"message": 'User "u" cannot patch'}, Forbidden, "cannot patch"),
        (410, {"message": "too old resource version"}, Expired, "too old"),
        (400, {"message": "unknown field"}, Refused, "unknown field"),
        (409, {"message": "was changed"}, Conflict, "was changed"),
        (422, {"message": "a rule's own words"}, Refused, "a rule's own words"),
        (429, {"message": "slow down"}, Unreachable, "429: slow down"),
        (503, b"<html>no healthy upstream</html>", Unreachable, "no healthy upstream"),
        (500, b'["no", "status"]', Unreachable, "500"),
        (502, b"\xff\xfe", Unreachable, "502"),
    ],
)
def test_failures(status: int, body: Object | bytes, kind: type[Failure], said: str) -> None:
    failure = failure_of(status, body if isinstance(body, bytes) else json.dumps(body).encode())

    assert type(failure) is kind
    assert said in failure.message


def followed(connection: FakeConnection, seconds: float = 10.0) -> tuple[list[int], list[str], float]:
    """(generations seen, what was told, seconds that it took)."""
    clock = Clock()
    told: list[str] = []
    seen: list[int] = []
    for current in Cluster(connection, "test", clock.sleep).follow("fleet", clock.left_of(seconds), told.append):
        seen.append(current["metadata"]["generation"])
        if seen[-1] == 9:
            break
    return seen, told, clock.seconds


@pytest.mark.parametrize(
    ("connection", "seen", "told"),
    [
        (lambda: FakeConnection(fleet(9)), [9], []),
        (lambda: FakeConnection(fleet(1), changes=[fleet(2), fleet(9)]), [1, 2, 9], []),
        # Too old to go on from: read anew.
        (lambda: FakeConnection(fleet(1), fleet(9), changes=[Expired("old")]), [1, 9], []),
        # Away for a while: told once, then on.
        (lambda: FakeConnection(Unreachable("away"), Unreachable("away"), fleet(9)), [9], ["away; trying again"]),
        (lambda: FakeConnection(fleet(1), fleet(9), changes=[Unreachable("cut")]), [1, 9], ["cut; trying again"]),
        # May read and not watch.
        (lambda: FakeConnection(fleet(1), fleet(2), fleet(9), changes=[Forbidden("no watch")]), [1, 2, 9], []),
    ],
    ids=["at-once", "changes", "expired", "away", "cut-off", "may-not-watch"],
)
def test_follow(connection: Callable[[], FakeConnection], seen: list[int], told: list[str]) -> None:
    assert followed(connection())[:2] == (seen, told)


def test_follow_ends_at_the_deadline() -> None:
    seen, told, seconds = followed(FakeConnection(Unreachable("away")), seconds=5.0)

    assert (seen, told, seconds) == ([], ["away; trying again"], 5.0)


@pytest.mark.parametrize(
    ("connection", "kind"),
    [
        (lambda: FakeConnection(not_found()), NotFound),
        (lambda: FakeConnection(Forbidden("no get")), Forbidden),
        (lambda: FakeConnection(fleet(), changes=[{"type": "DELETED", "object": fleet()}]), NotFound),
        (lambda: FakeConnection(fleet(), Forbidden("no more"), changes=[Forbidden("no watch")]), Forbidden),
    ],
    ids=["not-there", "may-not-read", "deleted", "no-right-any-more"],
)
def test_follow_gives_up_where_waiting_is_in_vain(
    connection: Callable[[], FakeConnection], kind: type[Failure]
) -> None:
    with pytest.raises(kind):
        followed(connection())


def kubeconfig(folder: Path, namespace: str | None) -> str:
    path = folder / "config"
    context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [
                    {"name": "one", "context": context},
                    {"name": "two", "context": context | {"namespace": "other"}},
                ],
                "current-context": "one",
            }
        )
    )
    return str(path)


@pytest.mark.parametrize(
    ("in_context", "context", "asked", "expected"),
    [
        (None, None, None, "default"),
        ("rl", None, None, "rl"),
        ("rl", None, "mine", "mine"),
        ("rl", "two", None, "other"),
    ],
)
def test_namespace(
    in_context: str | None, context: str | None, asked: str | None, expected: str, tmp_path: Path
) -> None:
    assert connect(kubeconfig(tmp_path, in_context), context, asked).namespace == expected


def test_no_server_and_no_cluster_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreachable, match=r"no answer from the API server at http://127.0.0.1:1: .*refused"):
        connect(kubeconfig(tmp_path, None), None, None).call("GET", "/version")
    with pytest.raises(Unreachable, match=r"no cluster: .*nowhere"):
        connect(kubeconfig(tmp_path, None), "nowhere", None)
    with pytest.raises(Unreachable, match="no cluster: "):
        connect(str(tmp_path / "missing"), None, None)
    # In a pod without a kubeconfig: its ServiceAccount, of which there is none here.
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(Unreachable, match="no cluster: Service"):
        connect(None, None, None)


@pytest.mark.parametrize("written", ["a: [\n", "- 1\n", "contexts: 3\ncurrent-context: x\n", "clusters:\n- 1\n", ""])
@pytest.mark.parametrize("context", [None, "x"])
def test_a_kubeconfig_that_is_none_is_told(tmp_path: Path, written: str, context: str | None) -> None:
    file = tmp_path / "config"
    file.write_text(written)
    with pytest.raises(Unreachable, match=r"Name (a kubeconfig|another one)"):
        connect(str(file), context, None)
