"""What the operator wants of one agent, as one level: sent again it changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .memory import LaunchOptions, MemoryOrder
from .operations import Operation
from .weights import PauseMode, WeightMove, WeightVersion


class ExecutionState(StrEnum):
    RUNNING = "Running"
    PAUSED = "Paused"


@dataclass(frozen=True)
class Execution:
    state: ExecutionState = ExecutionState.RUNNING
    pause_mode: PauseMode = PauseMode.RETRACT


@dataclass(frozen=True)
class GroupAssignment:
    """The pods that form one engine now. A launcher of a multi-node engine starts only with an assignment whose
    rank 0 confirms its pod UID and incarnation, and joins at that address: never at a DNS name, which may still
    be the terminating pod's. pods: UIDs of all of them, by rank; empty where there is but one."""

    incarnation: int
    rank0_pod_uid: str
    rank0_pod_ip: str
    pods: list[str] = field(default_factory=list)

    def same_pods(self, other: GroupAssignment) -> bool:
        """The incarnation grows with every start of the engine; a process that joined the same pods goes on."""
        at_rank0 = (self.rank0_pod_uid, self.rank0_pod_ip) == (other.rank0_pod_uid, other.rank0_pod_ip)
        # An operator of an older release does not tell all of them.
        return at_rank0 and (self.pods == other.pods or not (self.pods and other.pods))


@dataclass(frozen=True)
class AgentDesired:
    """PUT /v1/desired.

    lease_term: the operator's term; an agent that has seen a higher one answers 409.
    generation: of the resource that this was planned from.
    group: None until every pod of the engine exists with an address.
    boot: what an engine that starts from now on loads.
    move: the weight move to make; None: none, and what an unfinished one holds paused goes on as `execution` says.
    restart_engine: kill the engine if its start id is this one; any other engine is left alone.
    restart_drains: it serves a version that is allowed, so its requests may end before that.
    drain: no new work is coming; finish or abort what runs.
    probe_seconds: the deadline of the generation probe; 0 turns the probe off.
    launch: flags of an engine that starts from now on.
    memory: what must be released from GPU memory; None: nothing new, it stays as it is.
    operations: one-shot operations asked for; one that is no longer listed is forgotten when another of its kind is.
    hands_off: somebody else drives the engine: no route that changes it is called, only reports are made.
    open_door: a trainer may put weights into the engine by its own routes, and all else stays ours.
    expects_trainer: a trainer may send weights to be staged: what receives them is kept ready.
    prepare: weights to stage ahead, with `until` PREPARE; the engine sees nothing of it. It is no part of a move: the
    move that follows finds them in the stage.
    fellows: host:port of the agents of this engine's other pods; given to rank 0.
    peer_key: what agents of one fleet show each other when one reads the other's stage.
    serial: grows with every call of one lease term; a call that arrives after a later one is refused.
    """

    lease_term: int
    generation: int
    boot: WeightVersion
    execution: Execution
    group: GroupAssignment | None = None
    move: WeightMove | None = None
    restart_engine: str = ""
    restart_drains: bool = False
    drain: bool = False
    probe_seconds: float = 60.0
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    memory: MemoryOrder | None = None
    operations: list[Operation] = field(default_factory=list)
    hands_off: bool = False
    open_door: bool = False
    expects_trainer: bool = False
    prepare: WeightMove | None = None
    fellows: list[str] = field(default_factory=list)
    peer_key: str = ""
    serial: int = 0
