"""The watch of the resource, by kopf. Only `on.event`: kopf then writes nothing to the resource, no annotation and no
finalizer, and deletion works with the operator down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import kopf
from kubernetes.aio.client import Configuration

from ..api import group
from .kinds import Object
from .kube import authorization

OnEvent = Callable[[str | None, Object], None]
"""Told of every event: its type (None: found by a list) and the object."""


class _NoDiffBase(kopf.DiffBaseStorage):
    """kopf otherwise copies each body twice an event to find differences that nobody asks for: that is milliseconds
    for the status of a large fleet, before our handler is called."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[kopf.FieldSpec] | None = None) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        raise AssertionError("nothing is ever stored on the resource")


class _NoProgress(kopf.ProgressStorage):
    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        raise AssertionError("nothing is ever stored on the resource")

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        return None

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def operator_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # no watch of CRDs and namespaces, so no right to them is needed
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 15
    settings.networking.connect_timeout = 5
    settings.queueing.error_delays = ()
    settings.process.ultimate_exiting_timeout = 25
    return settings


async def login(configuration: Configuration) -> kopf.ConnectionInfo:
    """Our own client's credentials as they are now: kopf asks again after a 401, when a token file has changed."""
    scheme, _, token = (await authorization(configuration)).rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
    )


async def watch_resources(
    configuration: Configuration,
    namespaces: tuple[str, ...],
    on_event: OnEvent,
    stop: asyncio.Event,
    on_stopping: Callable[[], Any],
) -> None:
    """Runs kopf until `stop` is set, a signal comes, or a watch fails for good. on_stopping: awaited when it stops,
    before kopf cancels what is still running."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        return await login(configuration)

    @kopf.on.event(group.GROUP, group.VERSION, group.PLURAL, registry=registry)
    async def take(event: Any, **_: Any) -> None:
        on_event(event["type"], dict(event["object"]))

    @kopf.on.cleanup(registry=registry)
    async def clean_up(**_: Any) -> None:
        await on_stopping()

    await kopf.operator(
        registry=registry,
        settings=operator_settings(),
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
        # Only peering would use it. Without it kopf asks who the user is, and an image's user may have no name.
        identity="sglang-rollout",  # type: ignore[arg-type]
    )
