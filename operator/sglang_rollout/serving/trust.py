"""Who may order this pod about: ServiceAccount tokens, verified offline with the cluster's public keys that the
fleet's ConfigMap carries (OpenID Connect; Kubernetes' TokenRequest mints them)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jwt
from aiohttp import web

from sglang_rollout.protocol.fleet import Trust

from .errors import Forbidden, Unauthenticated
from .fleet_file import FleetFile, FleetFileUnreadable

if TYPE_CHECKING:  # names that the aiohttp of an engine's image may not have yet
    from aiohttp.typedefs import Handler, Middleware

# What kube-apiserver signs with: RSA or ECDSA keys of --service-account-signing-key-file. Never "none" or HMAC.
ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
CLOCK_SKEW_SECONDS = 30


def verify(token: str, trust: Trust, allowed: Collection[str] | None = None) -> str:
    """The user name (`sub`) of a token of one of `allowed`, by default the callers of `trust`. Raises Unauthenticated
    and Forbidden."""
    try:
        claims = jwt.decode(
            token,
            _signing_key(token, trust.jwks),
            algorithms=list(ALGORITHMS),
            audience=trust.audience,
            issuer=trust.issuer,
            leeway=CLOCK_SKEW_SECONDS,
            options={"require": ["exp", "iat", "aud", "iss", "sub"]},
        )
    except jwt.InvalidTokenError as error:
        raise Unauthenticated(f"the token is not valid here: {error}") from error
    caller = str(claims["sub"])
    if caller not in (trust.callers if allowed is None else allowed):
        raise Forbidden(f"{caller} is not among the callers that this fleet obeys")
    return caller


def _signing_key(token: str, jwks: dict[str, Any]) -> jwt.PyJWK:
    """The cluster's key that the token names."""
    named = jwt.get_unverified_header(token).get("kid")
    for entry in jwks.get("keys") or []:
        if isinstance(entry, dict) and entry.get("kid") == named and entry.get("use", "sig") == "sig":
            try:
                return jwt.PyJWK.from_dict(entry)
            except (jwt.PyJWTError, KeyError, TypeError, ValueError) as error:
                raise Unauthenticated(f"the cluster's key {named!r} cannot be used: {error}") from error
    raise Unauthenticated(f"the token is signed with key {named!r}, which is none of the cluster's keys known here")


def bearer_token(request: web.Request) -> str:
    """Raises Unauthenticated."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("a ServiceAccount token is needed: Authorization: Bearer <token>")
    return token.strip()


def callers_only(
    fleet: FleetFile, open_paths: Collection[str], trainer_paths: str = "", guarded_paths: str = ""
) -> Middleware:
    """A middleware that lets only the fleet's callers through, except on `open_paths`; below `trainer_paths`, where it
    is not empty, its trainers as well. What is below `guarded_paths` asks for another secret by itself. Paths that do
    not exist need a token as well. The fleet file is looked at on every call, so a rotated key counts at once."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        guarded = guarded_paths and request.path.startswith(guarded_paths)
        if request.path not in open_paths and not guarded:
            token = bearer_token(request)
            try:
                trust = fleet.read().trust
            except FleetFileUnreadable as error:
                raise Unauthenticated(f"nobody can be trusted yet: {error}") from error
            for_trainers = trainer_paths and request.path.startswith(trainer_paths)
            verify(token, trust, [*trust.callers, *trust.trainers] if for_trainers else trust.callers)
        return await handler(request)

    return check
