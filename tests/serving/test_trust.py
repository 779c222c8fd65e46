"""Tokens as kube-apiserver mints them: who is let in, who is not, and rotation of the cluster's keys."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_rollout.serving.errors import json_errors
from sglang_rollout.serving.fleet_file import FleetFile
from sglang_rollout.serving.trust import callers_only
from tests.serving.cluster_keys import AUDIENCE, ClusterKey, write_fleet_file

KEY = ClusterKey("first")
ELLIPTIC = ClusterKey("elliptic", "ES256")


async def answer(request: web.Request) -> web.Response:
    return web.json_response({"answered": request.path})


@pytest.fixture
def fleet_path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.json"
    write_fleet_file(path, [KEY, ELLIPTIC])
    return path


@pytest.fixture
async def client(fleet_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application(middlewares=[json_errors, callers_only(FleetFile(fleet_path), {"/livez"})])
    app.router.add_get("/livez", answer)
    app.router.add_get("/v1/report", answer)
    async with TestClient(TestServer(app)) as test_client:
        yield test_client


async def ask(client: TestClient[Any, Any], token: str | None, path: str = "/v1/report") -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with client.get(path, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("key", [KEY, ELLIPTIC], ids=lambda key: str(key.algorithm))
async def test_the_operator_is_let_in(client: TestClient[Any, Any], key: ClusterKey) -> None:
    assert await ask(client, key.token()) == (200, {"answered": "/v1/report"})


@pytest.mark.parametrize(
    ("token", "status", "says"),
    [
        (None, 401, "ServiceAccount token is needed"),
        ("", 401, "ServiceAccount token is needed"),
        ("rubbish", 401, "not valid here"),
        (KEY.token(aud=["sglang-rollout:other-uid"]), 401, "Audience"),
        (KEY.token(aud=["https://kubernetes.default.svc"]), 401, "Audience"),
        (KEY.token(iss="https://elsewhere"), 401, "issuer"),
        (KEY.token(exp=int(time.time()) - 60), 401, "expired"),
        (KEY.token(nbf=int(time.time()) + 600), 401, "not yet valid"),
        (KEY.token(exp=None), 401, '"exp"'),
        (KEY.token(aud=None), 401, '"aud"'),
        (KEY.token(sub="system:serviceaccount:team-a:default"), 403, "team-a:default is not among"),
        (ClusterKey("second").token(), 401, "'second'"),
        (ClusterKey("first").token(), 401, "Signature"),
        (KEY.unsigned_token(), 401, "not allowed"),
        (KEY.token_signed_with_the_public_key(), 401, "not allowed"),
    ],
    ids=lambda value: None if isinstance(value, str | int) and len(str(value)) > 60 else str(value)[:20],
)
async def test_who_is_refused(client: TestClient[Any, Any], token: str | None, status: int, says: str) -> None:
    got, body = await ask(client, token)
    assert (got, list(body)) == (status, ["error"])
    assert says in body["error"]


async def test_only_open_paths_are_open(client: TestClient[Any, Any]) -> None:
    assert (await ask(client, None, "/livez"))[0] == 200
    assert (await ask(client, None, "/nothing-here"))[0] == 401
    assert (await ask(client, KEY.token(), "/nothing-here"))[0] == 404


async def test_rotated_keys_count_at_once(client: TestClient[Any, Any], fleet_path: Path) -> None:
    second = ClusterKey("second")
    write_fleet_file(fleet_path, [second])
    assert (await ask(client, second.token()))[0] == 200
    assert (await ask(client, KEY.token()))[0] == 401


@pytest.mark.parametrize("broken", ["", "{", "[]", json.dumps({"name": "fleet"})])
async def test_a_broken_fleet_file_leaves_the_last_good_one(
    client: TestClient[Any, Any], fleet_path: Path, broken: str
) -> None:
    assert (await ask(client, KEY.token()))[0] == 200
    fleet_path.write_text(broken)
    assert (await ask(client, KEY.token()))[0] == 200
    fleet_path.unlink()
    assert (await ask(client, KEY.token()))[0] == 200


async def test_without_a_fleet_file_nobody_is_let_in(client: TestClient[Any, Any], fleet_path: Path) -> None:
    fleet_path.unlink()
    status, body = await ask(client, KEY.token())
    assert status == 401
    assert "nobody can be trusted yet" in body["error"]


async def test_a_key_that_cannot_be_read_does_not_hide_the_others(
    fleet_path: Path, client: TestClient[Any, Any]
) -> None:
    write_fleet_file(fleet_path, [KEY], more=[{"kty": "RSA", "kid": "odd"}, {"kty": "OKP"}, "text"])
    assert (await ask(client, KEY.token()))[0] == 200
    assert (await ask(client, ClusterKey("odd").token()))[0] == 401


def test_the_audience_is_the_fleets() -> None:
    assert AUDIENCE.endswith(":uid-1")
