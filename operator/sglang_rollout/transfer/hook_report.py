"""What the weight loader of one rank did, in a file for the agent of its pod: SGLang answers for rank 0 alone, and
says "success" whatever the loader found. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .stage_index import write_whole

FOLDER = "reports"


@dataclass(frozen=True)
class HookReport:
    """`written`: bytes may have been copied into the model, so that a failure leaves it mixed. `problem` is empty when
    all is well. `notes` are no failures. `compared` says whether the parameters' sum was held against the stage's:
    "equal", "different", or why it was not. `sums_digest` is equal for ranks of equal sharding and
    weights. `layouts` (Manifest.layout) are those that this rank's model is known to take whole: with one of them, and
    slots that were registered, an APPLY without a CHECK before it can be refused for nothing but the root."""

    transaction: str
    action: str
    rank: int
    world: int
    model: str
    pid: int
    version: str = ""
    root: str = ""
    problem: str = ""
    written: bool = False
    notes: tuple[str, ...] = ()
    compared: str = ""
    sums_digest: str = ""
    layouts: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.problem


def write_report(folder: Path, report: HookReport) -> None:
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / f"{report.rank}-{report.model}.json", json.dumps(asdict(report)).encode())


def read_reports(folder: Path, transaction: str, action: str) -> list[HookReport]:
    """Those of one call, of the ranks in this pod, lowest first. The agent knows how many ranks the pod has: fewer
    reports mean that a rank did not get as far as writing one."""
    found = [_read(path) for path in (folder / FOLDER).glob("*.json")]
    return sorted(
        (r for r in found if r is not None and (r.transaction, r.action) == (transaction, action)),
        key=lambda report: (report.rank, report.model),
    )


def report_from(value: dict[str, Any]) -> HookReport:
    """From its JSON. Raises KeyError and TypeError for one of another release."""
    return HookReport(**{**value, "notes": tuple(value["notes"]), "layouts": tuple(value["layouts"])})


def _read(path: Path) -> HookReport | None:
    try:
        return report_from(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of another release, or being removed: a missing report is the caller's business
