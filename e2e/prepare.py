"""Everything that is built or downloaded once, side by side: cluster programs and node image, SGLang for CPU and
its models, the project's images. A second run finds it all there and takes seconds.

    python -m e2e.prepare            all of it
    python -m e2e.prepare --only cluster | sglang | images
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import ClusterError, CurrentCluster, gobuild, open_cluster
from e2e.cluster.layout import Layout, cache_root
from e2e.cluster.node_image import ensure_node_image
from e2e.cluster.progress import say
from e2e.images.build import build_all
from e2e.lifetime import ends_with_parent, terminated_as_interrupted
from e2e.sglang_cpu import environment, models

LIMIT_SECONDS = 4500
TELL_EVERY = 20.0


def _cluster() -> None:
    layout = Layout.default()
    engine = open_cluster().engine
    engine.start()
    gobuild.build(layout, (*gobuild.API_SERVER, *gobuild.COMMANDS))
    ensure_node_image(engine, layout)


def _sglang() -> None:
    environment.install()
    models.make_all()


def _images() -> None:
    build_all()


PARTS: dict[str, Callable[[], None]] = {"cluster": _cluster, "sglang": _sglang, "images": _images}
"""By name; each runs as a process of its own, so that a keyboard interrupt or a failure ends all that it started."""


@dataclass
class _Part:
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    begun: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:160] if lines else "starting"


def everything(tell: Callable[[str], None] = say) -> None:
    """Run all parts at once. `tell` gets a line now and then. Raises ClusterError with the end of a failed part's
    log; the other parts are ended then, and go on where they were the next time."""
    parts = [_start(name) for name in PARTS]
    try:
        _watch(parts, tell)
    finally:
        for part in parts:
            _end(part)


def _start(name: str) -> _Part:
    log = cache_root() / "logs" / f"prepare-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "e2e.prepare", "--only", name],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )
    return _Part(name, log, process)


def _watch(parts: list[_Part], tell: Callable[[str], None]) -> None:
    begin = told = time.monotonic()
    running = list(parts)
    while running:
        time.sleep(0.2)
        for part in [one for one in running if one.process.poll() is not None]:
            running.remove(part)
            if part.process.returncode != 0:
                tail = "\n  ".join(part.log.read_text(errors="replace").splitlines()[-15:])
                raise ClusterError(f"preparing {part.name} failed; the end of {part.log}:\n  {tail}")
            if time.monotonic() - part.begun > TELL_EVERY:
                tell(f"{part.name}: ready after {time.monotonic() - part.begun:.0f} s")
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            for part in running:
                tell(f"{part.name}: {part.last_line()}")
        if time.monotonic() - begin > LIMIT_SECONDS:
            raise ClusterError(f"not prepared after {LIMIT_SECONDS} s: {', '.join(part.name for part in running)}")


def _end(part: _Part) -> None:
    """Interrupt it, as Ctrl-C would: its programs are ended by its own clean-up."""
    for number, patience in ((signal.SIGINT, 15.0), (signal.SIGKILL, 5.0)):
        if part.process.poll() is not None:
            return
        os.killpg(part.process.pid, number)
        try:
            part.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.prepare", description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    terminated_as_interrupted()
    try:
        if isinstance(open_cluster(), CurrentCluster):
            say("CLUSTER=current: nothing to prepare but kubectl and helm")
            gobuild.build(Layout.default(), (gobuild.PROGRAMS["kubectl"], gobuild.PROGRAMS["helm"]))
        elif options.only:
            PARTS[options.only]()
        else:
            everything()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
