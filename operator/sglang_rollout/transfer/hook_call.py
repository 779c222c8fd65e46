"""What the agent says to the weight loader in every rank of its engine, and the body of the request that carries it.
Standard library only, on both sides: the agent needs no torch to call."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

LOADER = "sglang_rollout.engine.weight_loader.load"
"""For --custom-weight-loader, and load_format of /update_weights_from_tensor."""

_PREFIX = "sglang-rollout:1:"


class Action(StrEnum):
    """REGISTER  map and pin the stage and rehearse loading what it holds; before the engine is first routable
    CHECK     the weights of `root` are staged here, whole, and this rank's model can take every one; writes nothing
    APPLY     load them
    SUMS      sums of the parameters as they are now
    """

    REGISTER = "register"
    CHECK = "check"
    APPLY = "apply"
    SUMS = "sums"


class CallRefused(Exception):
    """What came is no call of ours."""


@dataclass(frozen=True)
class HookCall:
    """`root` is the digest of the manifest. `model` is the class name of the one model that it is for, "" for all:
    with a draft model the loader is called for both. `sums`: compare the parameters with the stage after APPLY."""

    action: Action
    transaction: str
    version: str = ""
    root: str = ""
    model: str = ""
    sums: bool = True

    def to_name(self) -> str:
        return _PREFIX + json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_name(cls, name: str) -> HookCall:
        """Raises CallRefused."""
        if not name.startswith(_PREFIX):
            raise CallRefused(f"the loader takes calls of the agent, this is a tensor named {name[:80]!r}")
        try:
            value = json.loads(name.removeprefix(_PREFIX))
            return cls(**{**value, "action": Action(value["action"])})
        except (ValueError, KeyError, TypeError) as error:
            raise CallRefused(f"the call has another form than expected: {error!r}") from error


def request_body(call: HookCall, ranks: int) -> dict[str, Any]:
    """For POST /update_weights_from_tensor: the same to each of the `ranks` of tensor parallelism. Nothing is flushed,
    aborted or relabelled by it."""
    entry = base64.b64encode(_named_tensor(call.to_name())).decode()
    return {
        "serialized_named_tensors": [entry] * ranks,
        "load_format": LOADER,
        "flush_cache": False,
        "abort_all_requests": False,
        "weight_version": None,
    }


def _named_tensor(name: str) -> bytes:
    """The pickle of [(name, torch.ByteTensor())], one empty tensor, whose name carries all: SGLang moves the tensors
    to the GPU before it calls the loader, and a name costs nothing there."""
    text = name.encode()
    # PROTO 2, EMPTY_LIST, BINUNICODE, GLOBAL, EMPTY_TUPLE, REDUCE, TUPLE2, APPEND, STOP
    return b"\x80\x02]X" + struct.pack("<I", len(text)) + text + b"ctorch\nByteTensor\n)R\x86a."
