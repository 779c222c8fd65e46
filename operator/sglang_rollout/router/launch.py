"""`python -m sglang_rollout.router.launch [--policy P] [smg's flags]`: PID 1 of the router's container.

Runs smg and its front. Either one's end is the other's; at SIGTERM smg drains first and the front stays until then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from sglang_rollout.serving.private_file import write_private

from .front import Front, key_digests
from .settings import CONTROL_KEY, FRONT_CONFIGURATION, FRONT_KEYS, RouterSettings

log = logging.getLogger("sglang_rollout.router.launch")

CONTROL_KEY_SECONDS = 60.0  # the sidecar has started before this container does
KEYS_LOOK_SECONDS = 10.0  # the kubelet itself brings a changed secret within a minute or so
STOP_SECONDS = 5.0


class CannotStart(Exception):
    """The router cannot be started as it was asked to."""


class ClientKeys:
    """The front's copy of the clients' keys, as digests."""

    def __init__(self, settings: RouterSettings) -> None:
        self._source = settings.client_keys
        self._digests = settings.run_dir / FRONT_KEYS
        self._written = ""

    def refresh(self) -> bool:
        """Writes the front's file when the keys are others than before. Raises CannotStart when there are none."""
        if self._source is None:
            return False
        try:
            digests = key_digests(self._source.read_text())
        except OSError as error:
            raise CannotStart(f"the key of router.auth cannot be read from {self._source}: {error.strerror}") from error
        if not digests:
            raise CannotStart(f"the key of router.auth in {self._source} is empty: put a key into the secret")
        if digests == self._written:
            return False
        write_private(self._digests, digests.encode())
        self._written = digests
        return True


def front(settings: RouterSettings) -> Front:
    dual = socket.has_dualstack_ipv6()
    return Front(
        bind=f":::{settings.port} v4v6" if dual else f"*:{settings.port}",
        gateway_port=settings.gateway_port,
        digests=None if settings.client_keys is None else settings.run_dir / FRONT_KEYS,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processors=len(os.sched_getaffinity(0)),
    )


async def supervise(arguments: Sequence[str], settings: RouterSettings) -> int:
    """Until cancelled or one of the two ends. Returns the exit code for the container. Raises CannotStart."""
    await _wait_for_control_key(settings)
    if shutil.which("haproxy") is None:
        raise CannotStart("there is no haproxy in this image: build router.image from images/router")
    keys = ClientKeys(settings)
    keys.refresh()
    configuration = settings.run_dir / FRONT_CONFIGURATION
    write_private(configuration, front(settings).configuration().encode())
    gateway_command = [sys.executable, "-m", "sglang_rollout.router.gateway", *arguments]
    gateway = await asyncio.create_subprocess_exec(*gateway_command)
    haproxy = await asyncio.create_subprocess_exec("haproxy", "-W", "-db", "-f", str(configuration))
    ends = [asyncio.create_task(gateway.wait()), asyncio.create_task(haproxy.wait())]
    watch = asyncio.create_task(_watch_keys(keys, haproxy))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.error(
            "%s ended with %s", *(("smg", gateway.returncode) if ends[0].done() else ("haproxy", haproxy.returncode))
        )
        return gateway.returncode or haproxy.returncode or 1
    except asyncio.CancelledError:
        return await _drain(gateway)
    finally:
        watch.cancel()
        for process in (gateway, haproxy):
            await _stop(process)


async def _drain(gateway: asyncio.subprocess.Process) -> int:
    """smg goes on routing for five seconds, until no one sends to this pod any more, then waits for what runs."""
    log.info("stopping: waiting for running requests")
    with suppress(ProcessLookupError):
        gateway.terminate()
    return await gateway.wait()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _watch_keys(keys: ClientKeys, haproxy: asyncio.subprocess.Process) -> None:
    """A rotated key counts without a restart: HAProxy loads it anew and lets running requests end."""
    while True:
        await asyncio.sleep(KEYS_LOOK_SECONDS)
        try:
            if keys.refresh():
                log.info("the clients' keys have changed")
                haproxy.send_signal(signal.SIGUSR2)
        except CannotStart as error:
            log.warning("%s; the keys known before stay in force", error)


async def _wait_for_control_key(settings: RouterSettings) -> None:
    path = settings.run_dir / CONTROL_KEY
    try:
        async with asyncio.timeout(CONTROL_KEY_SECONDS):
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise CannotStart(f"the sidecar has made no {path} in {CONTROL_KEY_SECONDS:.0f} s: look at its log") from error


async def _main() -> int:
    task = asyncio.ensure_future(supervise(sys.argv[1:], RouterSettings.from_environment(os.environ)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except CannotStart as error:
        log.error("%s", error)
        return 1
    except asyncio.CancelledError:
        return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.exit(asyncio.run(_main()))
