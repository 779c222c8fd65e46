"""What launcher and agent of one pod tell each other over local sockets and one file in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from .memory import LaunchOptions


@dataclass(frozen=True)
class LaunchRequest:
    """POST /v1/launch from the launcher, once for each start of the engine container. The agent holds the answer
    until the engine may start and answers 425 with a reason when the launcher should ask again."""

    start_id: str


@dataclass(frozen=True)
class LaunchOrder:
    """What to start. rendezvous: host:port of rank 0 for a multi-node engine, else empty. launch: on a device that
    has no memory saver (CPU) its flags are left out: release does nothing there."""

    model_path: str
    weight_version: str
    rendezvous: str = ""
    launch: LaunchOptions = field(default_factory=LaunchOptions)


@dataclass(frozen=True)
class EngineRecord:
    """RUN_DIR/engine.json, written by the launcher (atomically, 0600) before SGLang starts and when it ends.

    hook: it was started with our weight loader; one without dies of a call to it."""

    start_id: str
    started_at: str
    order: LaunchOrder
    data_key: str
    admin_key: str
    hook: bool = False
    pid: int = 0
    exited: bool = False
    exit_code: int = 0
    failure: str = ""  # the last log line that matters
    last_lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KillOrder:
    """POST /v1/kill from the agent: ends the engine if it is still this start, with the reason for its log. ordered:
    it is to start again, and its end is no failure."""

    start_id: str
    reason: str
    ordered: bool = False
