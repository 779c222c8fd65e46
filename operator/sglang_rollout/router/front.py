"""The front of the router: HAProxy between the clients and smg, in the same container.

smg hands a caller's Authorization header on to the engine, in place of the engine's own key, so every client that
sends one (all of OpenAI's do) would be refused by our engines. The front checks the clients' key and takes the header
away; with it goes any way to smg's control plane from outside the pod.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

OPEN_PATHS = ("/health", "/liveness", "/readiness")
HOLD_SECONDS = 24 * 3600  # how long a request may wait in silence at a paused engine
MAX_CONNECTIONS = 65536
MAX_THREADS = 4
SPARE_FILES = 256


@dataclass(frozen=True)
class Front:
    """bind: HAProxy's address to listen at. digests: file of `key_digests`, None: everyone is served.
    open_files: how many the process may open; a client takes two."""

    bind: str
    gateway_port: int
    digests: Path | None
    open_files: int
    processors: int

    def configuration(self) -> str:
        connections = max(64, min(MAX_CONNECTIONS, (self.open_files - SPARE_FILES) // 2))
        lines = [
            "global",
            f"  maxconn {connections}",
            f"  nbthread {max(1, min(MAX_THREADS, self.processors))}",
            "defaults",
            "  mode http",
            "  timeout connect 5s",
            "  timeout http-request 30s",
            "  timeout http-keep-alive 90s",
            f"  timeout client {HOLD_SECONDS}s",
            f"  timeout server {HOLD_SECONDS}s",
            "  option clitcpka",
            "  option abortonclose",  # a client that goes away must end its request at the engine
            *(_error(status, sentence) for status, sentence in _ERRORS),
            "frontend clients",
            f"  bind {self.bind}",
            *(self._key_check() if self.digests is not None else ()),
            "  http-request del-header Authorization",
            "  default_backend gateway",
            "backend gateway",
            "  retry-on none",  # a request that was sent twice would be generated twice
            f"  server smg 127.0.0.1:{self.gateway_port}",
        ]
        return "\n".join(lines) + "\n"

    def _key_check(self) -> tuple[str, ...]:
        answer = _json("a valid API key is needed: Authorization: Bearer <key>", "invalid_api_key")
        return (
            f"  acl open path {' '.join(OPEN_PATHS)}",
            f"  acl known req.hdr(authorization),sha2(256),hex -m str -f {self.digests}",
            "  http-request return status 401 content-type application/json hdr WWW-Authenticate Bearer"
            f" string '{answer}' unless open or known",
        )


_ERRORS = (
    (400, "not a valid HTTP request"),
    (408, "the request did not arrive in time"),
    (502, "the router gave no valid answer"),
    (503, "the router is starting"),
    (504, "the router gave no answer in time"),
)


def _error(status: int, sentence: str) -> str:
    return f"  http-error status {status} content-type application/json string '{_json(sentence, 'router_front')}'"


def _json(sentence: str, code: str) -> str:
    """In the form of OpenAI's errors, which smg's have too."""
    return f'{{"error":{{"message":"{sentence}","type":"router_error","param":null,"code":"{code}"}}}}'


def key_digests(keys: str) -> str:
    """The front's file for a key file with one key a line, so that a key can be replaced while both are valid."""
    headers = (f"Bearer {key.strip()}" for key in keys.splitlines() if key.strip())
    return "".join(f"{hashlib.sha256(header.encode()).hexdigest().upper()}\n" for header in headers)
