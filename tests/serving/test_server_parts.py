"""Lease terms over restarts, long polls, and JSON errors for every failure."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_rollout.protocol.routing import RouterDesired, RouterReport
from sglang_rollout.protocol.wire import loads
from sglang_rollout.serving.errors import Superseded, json_errors
from sglang_rollout.serving.longpoll import ReportBoard, report_handler
from sglang_rollout.serving.private_file import write_private
from sglang_rollout.serving.terms import LeaseTerms

REPORT = RouterReport(revision=0, sidecar_start="s", pod_uid="p")


def test_a_lower_term_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    terms = LeaseTerms(tmp_path / "term")
    terms.accept(3)
    terms.accept(3)
    terms.accept(7)
    restarted = LeaseTerms(tmp_path / "term")
    assert restarted.highest == 7
    with pytest.raises(Superseded, match="term 6 is over: this pod has obeyed term 7"):
        restarted.accept(6)
    restarted.accept(7)


def test_an_order_that_arrives_after_its_successor_is_refused(tmp_path: Path) -> None:
    terms = LeaseTerms(tmp_path / "term")
    terms.accept(3, 10)
    terms.accept(3, 12)
    with pytest.raises(Superseded, match="order 11 of term 3 comes late"):
        terms.accept(3, 11)
    terms.accept(3, 12)  # the same call again
    terms.accept(3)  # of an operator that does not count
    terms.accept(4, 1)  # a new leader counts anew
    with pytest.raises(Superseded, match="term 3 is over"):
        terms.accept(3, 99)


def test_an_unreadable_term_is_not_term_zero(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        LeaseTerms(tmp_path / "term")


def test_a_private_file_is_private_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    left_over = tmp_path / ".key.new"
    left_over.write_text("half")
    left_over.chmod(0o666)
    write_private(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_says_of_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'file'}'"):
        write_private(tmp_path / "file", b"new")


async def test_a_change_answers_everyone_who_waits() -> None:
    board = ReportBoard(REPORT, first_revision=5)
    waiting = [asyncio.create_task(board.after(5, 30)) for _ in range(3)]
    await asyncio.sleep(0)
    board.publish(replace(board.report, message="changed"))
    assert [(r.revision, r.message) for r in await asyncio.gather(*waiting)] == [(6, "changed")] * 3


async def test_an_equal_report_is_no_change() -> None:
    board = ReportBoard(REPORT, first_revision=5)
    board.publish(replace(REPORT, revision=99))
    assert board.report.revision == 5
    assert (await board.after(5, 0.01)).revision == 5


async def test_a_revision_of_an_earlier_process_is_answered_at_once() -> None:
    board = ReportBoard(REPORT)
    assert board.report.revision > 1_600_000_000_000
    assert await board.after(board.report.revision + 10, 30) is board.report


async def test_closing_answers_everyone() -> None:
    board = ReportBoard(REPORT, first_revision=5)
    waiting = asyncio.create_task(board.after(5, 30))
    await asyncio.sleep(0)
    board.close()
    assert (await waiting).revision == 5
    assert (await board.after(5, 30)).revision == 5


async def _fails(request: web.Request) -> web.Response:
    raise OSError("disk on fire")


async def _malformed(request: web.Request) -> web.Response:
    loads(RouterDesired, await request.read())
    return web.Response()


async def _moved(request: web.Request) -> web.Response:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/absent", 404, "GET /absent: Not Found"),
        ("/fails", 500, "OSError: disk on fire"),
        ("/malformed", 400, "not a RouterDesired"),
        ("/report?after=x", 400, "after must be a revision"),
        ("/report?wait=nan", 400, "wait must be a number"),
    ],
)
async def test_every_failure_is_json(path: str, status: int, says: str) -> None:
    app = web.Application(middlewares=[json_errors])
    app.router.add_get("/fails", _fails)
    app.router.add_get("/malformed", _malformed)
    app.router.add_get("/moved", _moved)
    app.router.add_get("/report", report_handler(ReportBoard(REPORT)))
    async with TestClient[Any, Any](TestServer(app)) as client:
        async with client.get(path) as response:
            body = await response.json()
            assert (response.status, list(body)) == (status, ["error"])
            assert says in body["error"]
        async with client.get("/moved", allow_redirects=False) as response:
            assert response.status == 302


async def test_a_report_over_http() -> None:
    app = web.Application(middlewares=[json_errors])
    app.router.add_get("/report", report_handler(ReportBoard(REPORT, first_revision=5)))
    async with TestClient[Any, Any](TestServer(app)) as client:
        for query in ("", "?after=4&wait=30", "?after=5&wait=0.01", "?after=5&wait=-1"):
            async with client.get(f"/report{query}") as response:
                assert loads(RouterReport, await response.read()).revision == 5
