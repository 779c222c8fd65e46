"""JSON over HTTP on Unix sockets, with the standard library: how launcher and agent of a pod talk."""

from __future__ import annotations

import http.client
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Answer = tuple[int, dict[str, Any]]
Handler = Callable[[dict[str, Any]], Answer]
MAX_BODY_BYTES = 1 << 20


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def call(path: Path, method: str, target: str, message: Mapping[str, Any], timeout: float) -> Answer:
    """One request; `timeout` in seconds for each step of it. Raises OSError and http.client.HTTPException when
    nobody answers, ValueError when the answer is not a JSON object."""
    connection = _UnixConnection(path, timeout)
    try:
        connection.request(method, target, json.dumps(message), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = json.loads(response.read() or b"{}")
    finally:
        connection.close()
    if not isinstance(body, dict):
        raise ValueError(f"{target} answered {type(body).__name__}, not an object")
    return response.status, body


class LocalServer:
    """Serves `routes`, keyed by (method, path), from a thread of its own until closed, which takes up to
    `close_seconds`."""

    def __init__(self, path: Path, routes: Mapping[tuple[str, str], Handler], close_seconds: float = 0.5) -> None:
        class Request(BaseHTTPRequestHandler):
            timeout = 10.0

            def _serve(self) -> None:
                handler = routes.get((self.command, self.path))
                if handler is None:
                    return self._answer(404, {"error": f"{self.command} {self.path} is not served here"})
                try:
                    length = min(int(self.headers.get("Content-Length") or 0), MAX_BODY_BYTES)
                    message = json.loads(self.rfile.read(length) or b"{}")
                    if not isinstance(message, dict):
                        raise ValueError("not an object")
                except ValueError as error:
                    return self._answer(400, {"error": f"malformed message: {error}"})
                return self._answer(*handler(message))

            def _answer(self, status: int, message: dict[str, Any]) -> None:
                body = json.dumps(message).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _serve  # noqa: N815 - http.server's names

            def address_string(self) -> str:
                return "local"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                """Requests of the agent are not worth a line in the engine's log."""

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        path.unlink(missing_ok=True)
        self._server = Server(os.fspath(path), Request)
        path.chmod(0o600)
        thread = threading.Thread(
            target=self._server.serve_forever, args=(close_seconds,), name="local-http", daemon=True
        )
        thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
