"""Whether, and as part of what, the engine of this pod may start: the boot checkpoint must be readable, and the pods
of a multi-node engine must be those that the operator assigned, asked at rank 0 itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import aiohttp

from sglang_rollout.protocol import pod
from sglang_rollout.protocol.desired import AgentDesired, GroupAssignment
from sglang_rollout.protocol.launch import LaunchOrder
from sglang_rollout.protocol.memory import LaunchOptions
from sglang_rollout.protocol.report import AgentIdentity
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import MalformedMessage, loads
from sglang_rollout.serving.fleet_file import FleetFile, FleetFileUnreadable

from .checkpoint import CheckpointRefused
from .journal import Joined
from .reference import ReferenceFile
from .settings import AgentSettings
from .sglang_versions import UnsupportedRelease, release_of
from .stage_room import StageRoom

CHECKPOINT_SECONDS = 60.0
IDENTITY_SECONDS = 3.0
RESERVE_SECONDS = 300.0  # the kernel makes pages at some GB a second


class NotYet(Exception):
    """The engine may not start; the sentence says what is waited for."""


@dataclass(frozen=True)
class Start:
    order: LaunchOrder
    joined: Joined | None


class StartGate:
    def __init__(
        self,
        settings: AgentSettings,
        fleet: FleetFile,
        reference: ReferenceFile,
        room: StageRoom,
        session: aiohttp.ClientSession,
        desired: Callable[[], AgentDesired | None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._reference = reference
        self._room = room
        self._session = session
        self._desired = desired

    async def ask(self, start_id: str) -> Start:
        """What the launcher's start `start_id` runs. Raises NotYet."""
        _check_release()
        joined = await self._join(start_id) if self._settings.nodes > 1 else None
        boot = self._boot()
        try:
            async with asyncio.timeout(CHECKPOINT_SECONDS):
                checkpoint = await asyncio.to_thread(self._reference.keep, start_id, Path(boot.path))
        except CheckpointRefused as refusal:
            raise NotYet(f"version {boot.version!r} cannot be loaded: {refusal}") from refusal
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CHECKPOINT_SECONDS:g} s"
            raise NotYet(f"version {boot.version!r} cannot be read from {boot.path}: {reason}") from error
        # Before the engine takes memory of its own. What does not fit is reported, and keeps nothing from starting.
        try:
            async with asyncio.timeout(RESERVE_SECONDS):
                await asyncio.to_thread(self._room.reserve, checkpoint)
        except TimeoutError as error:
            raise NotYet(f"memory for staged weights was not reserved within {RESERVE_SECONDS:g} s") from error
        rendezvous = pod.address_of(joined.group.rank0_pod_ip, self._settings.rendezvous_port) if joined else ""
        return Start(LaunchOrder(boot.path, boot.version, rendezvous, self._launch()), joined)

    async def rank0(self, group: GroupAssignment) -> AgentIdentity:
        """What the agent at rank 0's address says it is. Raises NotYet."""
        url = f"http://{pod.address_of(group.rank0_pod_ip, self._settings.agent_port)}{pod.PATH_IDENTITY}"
        try:
            deadline = aiohttp.ClientTimeout(total=IDENTITY_SECONDS)
            async with self._session.get(url, timeout=deadline) as response:
                return loads(AgentIdentity, await response.read())
        except (aiohttp.ClientError, TimeoutError, MalformedMessage) as error:
            raise NotYet(f"rank 0's agent does not answer at {url}: {error or type(error).__name__}") from error

    def _boot(self) -> WeightVersion:
        """The operator's last word, else what the fleet's ConfigMap says."""
        desired = self._desired()
        if desired is not None:
            return desired.boot
        try:
            return self._fleet.read().boot
        except FleetFileUnreadable as error:
            raise NotYet(str(error)) from error

    def _launch(self) -> LaunchOptions:
        desired = self._desired()
        if desired is not None:
            return desired.launch
        try:
            return self._fleet.read().launch
        except FleetFileUnreadable as error:
            raise NotYet(str(error)) from error

    async def _join(self, start_id: str) -> Joined:
        desired = self._desired()
        group = desired.group if desired else None
        if group is None:
            raise NotYet("the operator has not assigned this pod to an engine yet")
        if self._settings.rank == 0:
            if group.rank0_pod_uid != self._settings.pod_uid:
                raise NotYet(f"the operator assigned pod {group.rank0_pod_uid} as rank 0, not this one")
            return Joined(start_id, group, start_id)
        found = await self.rank0(group)
        if (found.pod_uid, found.rank) != (group.rank0_pod_uid, 0):
            raise NotYet(f"{group.rank0_pod_ip} is pod {found.pod_uid}, not rank 0 {group.rank0_pod_uid}")
        if found.incarnation != group.incarnation:
            raise NotYet(f"rank 0 is of incarnation {found.incarnation}, this pod of {group.incarnation}")
        if not found.start_id:
            raise NotYet("rank 0's launcher has not asked to start yet")
        return Joined(start_id, group, found.start_id)


def _check_release() -> None:
    """The agent runs in the engine's image: a release that cannot be driven is refused before it loads anything. Where
    the package is not there (a build that is not installed), the engine itself tells when it is up. Raises NotYet."""
    try:
        release_of(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        return
    except UnsupportedRelease as refusal:
        raise NotYet(str(refusal)) from refusal
