"""Our commits: staged on the GPU or in host memory, with the parts that the loader reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_rollout.transfer.hook_call import Action

from .engine import Engine
from .events import IN_PLACE, RETRACT, Events, Parts, checked, timed
from .preparation import VERSIONS, Prepared, read_into, use_medium
from .settings import Settings
from .streams import DecodeStreams


@dataclass(frozen=True)
class How:
    """What a commit does beside copying. `checked`: the loader is asked first whether it can."""

    checked: bool = False
    sums: bool = True

    @property
    def words(self) -> str:
        return f"{'check, ' if self.checked else ''}apply{', sums' if self.sums else ''}"


AS_AGENTS = How()
VARIANTS = (How(checked=True), How(sums=False))


@dataclass
class Commits:
    settings: Settings
    engine: Engine
    events: Events
    prepared: Prepared
    serves: str = ""
    registered: dict[str, Any] = field(default_factory=dict)

    def baseline(self) -> None:
        for _ in range(self.settings.repeats):
            self.events.nothing()
            for mode in (RETRACT, IN_PLACE):
                self.events.event("pause and continue", mode, lambda parts: None)

    def staged(self, medium: str) -> dict[str, Any]:
        """Returns what registration took, outside of what is measured: mapping, pinning, one trial of loading."""
        found = self.register(medium)
        for _ in range(self.settings.repeats):
            for mode in (RETRACT, IN_PLACE):
                self._under_load(medium, mode, AS_AGENTS)
        return found

    def variants(self, medium: str) -> None:
        self.register(medium)
        for how in VARIANTS:
            for _ in range(max(1, self.settings.repeats // 2)):
                self._under_load(medium, IN_PLACE, how)

    def one_version_each(self) -> dict[str, Any]:
        """One version on the GPU, the other in host memory, for models of which there is no room for more. A medium's
        version is loaded again and again; that it was the other one before is so at each medium's first."""
        found: dict[str, Any] = {}
        for medium in (*self.prepared.media, self.prepared.media[0]):
            found[f"register {medium}"] = self.register(medium)
            for _ in range(self.settings.repeats):
                for mode in (RETRACT, IN_PLACE):
                    self._under_load(medium, mode, AS_AGENTS)
        return found

    def register(self, medium: str) -> dict[str, Any]:
        """Again whenever the medium changes: the loader keeps one stage mapped."""
        use_medium(self.settings, medium)
        if medium not in self.registered:
            self.registered.clear()
            report = checked(self.engine.outside_pause(Action.REGISTER), "register")
            self.registered[medium] = {**report.seconds, "notes": report.notes}
        found: dict[str, Any] = self.registered[medium]
        return found

    def _under_load(self, medium: str, mode: str, how: How) -> None:
        version = self.prepared.versions(medium)[0]
        if version == self.serves:
            version = self.prepared.versions(medium)[-1]
        self.serves = version
        body = partial(commit, self.engine, self.prepared.roots[version], version, how)
        self.events.event(f"staged on {medium}: {how.words}", mode, body, version)

    def refused(self) -> str:
        """A digest that is not staged, asked for in a pause; the engine goes on with the old weights."""
        found: list[str] = []

        def check(parts: Parts) -> None:
            self.engine.begin()
            with timed(parts, "apply"):
                report = self.engine.hook(Action.APPLY, "0" * 64)
            self.engine.end()
            found.append(report.problem + (" WRITTEN" if report.written else ""))

        self.events.event("wrong digest refused", RETRACT, check, self.serves)
        return found[0]

    def read_beside_decoding(self, streams: DecodeStreams) -> dict[str, float]:
        """A checkpoint into the host stage while the streams run."""
        stage = self.prepared.host
        slot = next(s.name for s in stage.slots if s.sealed is not None and s.sealed.version != self.serves)
        version = next(v for v in VERSIONS if v != self.serves)
        base = streams.rate(3.0)
        begin = time.monotonic()
        read_into(self.settings, stage, slot, version)
        end = time.monotonic()
        tokens = len(streams.stamps(begin, end))
        return {
            "seconds": round(end - begin, 2),
            "GB/s": round(self.prepared.size / 1e9 / (end - begin), 1),
            "decode, of base": round(tokens / (end - begin) / base, 3),
        }


def commit(engine: Engine, root: str, version: str, how: How, parts: Parts) -> None:
    """What an agent does between pause and continue. Raises RuntimeError when the loader refuses."""
    engine.begin()
    if how.checked:
        with timed(parts, "check"):
            check = checked(engine.hook(Action.CHECK, root, version), "check")
        parts |= {f"check/{name}": seconds for name, seconds in check.seconds.items()}
    with timed(parts, "apply"):
        applied = checked(engine.hook(Action.APPLY, root, version, sums=how.sums), "apply")
    parts |= {f"apply/{name}": seconds for name, seconds in applied.seconds.items()}
    engine.end()
    with timed(parts, "label"):
        engine.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
