"""A call to the program in a pod, with its fleet's token, for the pod's report. What comes back is believed only if it
is that pod's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from ..protocol import pod
from ..protocol.wire import MalformedMessage, loads
from .kube_errors import KubeError
from .pod_connection import Answer, BadAnswer, PodConnection
from .tokens import FleetTokens

REPORT_BYTES = 4 << 20  # what a pod may answer at most: its image is the tenant's


class Report(Protocol):
    """AgentReport or RouterReport."""

    @property
    def revision(self) -> int: ...

    @property
    def pod_uid(self) -> str: ...

    @property
    def lease_term(self) -> int: ...


R = TypeVar("R", bound=Report)


class CallFailed(Exception):
    """In a sentence. status: of HTTP, 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Dialect(Generic[R]):
    """What differs between agents and router sidecars. start_of: the random id of the reporting process, which
    must be told again what is wanted when it changes. problem_of: why a report cannot be believed, empty when it
    can."""

    name: str
    port: int
    report: type[R]
    start_of: Callable[[R], str]
    problem_of: Callable[[R], str] = lambda _: ""


@dataclass(frozen=True)
class Target:
    """A pod to link to. audience: of the tokens that it accepts."""

    uid: str
    name: str
    ip: str
    audience: str


class PodCaller(Generic[R]):
    """One call at a time, over a connection that is kept. on_call: told of every call: operation, status code (or
    "error"), seconds."""

    def __init__(
        self, target: Target, dialect: Dialect[R], tokens: FleetTokens, on_call: Callable[[str, str, float], None]
    ) -> None:
        self._target = target
        self._dialect = dialect
        self._tokens = tokens
        self._on_call = on_call
        self._connection = PodConnection(target.ip, dialect.port, REPORT_BYTES)
        self._who = f"the {dialect.name} of {target.name}"
        self._query = f"?{pod.QUERY_POD}={quote(target.uid)}"

    async def get_report(self, query: str, seconds: float) -> R:
        """query: what follows the pod's UID. Raises CallFailed."""
        return await self._call("report", "GET", f"{pod.PATH_REPORT}{self._query}{query}", b"", seconds)

    async def put_desired(self, body: bytes, seconds: float) -> R:
        """Raises CallFailed, after which it may have been heard all the same."""
        return await self._call("desired", "PUT", f"{pod.PATH_DESIRED}{self._query}", body, seconds)

    def close(self) -> None:
        self._connection.close()

    async def _call(self, operation: str, method: str, target: str, body: bytes, seconds: float) -> R:
        """A token that the pod refuses is replaced once: it may have been minted before the cluster's keys were
        rotated."""
        audience = self._target.audience
        for attempt in (1, 2):
            try:
                token = await self._tokens.token(audience)
            except KubeError as error:
                raise CallFailed(f"no token for {self._who}: {error}") from error
            answer = await self._answer(operation, method, target, token, body, seconds)
            if answer.status != 401 or attempt == 2:
                return self._report_in(answer)
            self._tokens.discard(audience, token)
        raise AssertionError("the second attempt returns or raises")

    async def _answer(
        self, operation: str, method: str, target: str, token: str, body: bytes, seconds: float
    ) -> Answer:
        started = time.monotonic()
        code = "error"
        try:
            answer = await self._connection.call(method, target, token, body, seconds)
            code = str(answer.status)
        except (TimeoutError, OSError) as error:
            raise CallFailed(f"{self._who} does not answer: {error or type(error).__name__}") from error
        except BadAnswer as error:
            raise CallFailed(f"{self._who} answers {error}") from error
        finally:
            self._on_call(operation, code, time.monotonic() - started)
        return answer

    def _report_in(self, answer: Answer) -> R:
        """The report, if it can be believed. Raises CallFailed."""
        if answer.status != 200:
            raise CallFailed(f"{self._who} answers {answer.status}: {_sentence(answer.body)}", answer.status)
        try:
            report = loads(self._dialect.report, answer.body)
        except MalformedMessage as error:
            raise CallFailed(f"{self._who} answers nonsense: {error}") from error
        if report.pod_uid != self._target.uid:
            raise CallFailed(f"another pod (UID {report.pod_uid}) answers at the address of {self._target.name}")
        if problem := self._dialect.problem_of(report):
            raise CallFailed(f"{self._who} cannot be believed: it reports {problem}")
        return report


def _sentence(answer: bytes) -> str:
    """The sentence of our JSON errors, or the beginning of whatever it is."""
    try:
        return loads(_Error, answer).error
    except MalformedMessage:
        return answer[:200].decode(errors="replace")


@dataclass(frozen=True)
class _Error:
    error: str
