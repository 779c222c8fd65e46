"""spec.router: what spreads requests over the routable engines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from .cel import is_default
from .kubernetes_types import ResourceRequirements, SecretKeySelector
from .overlay import PodOverlay
from .owned_flags import ROUTER_FLAGS
from .schema import ApiModel, Rule, list_type

ROUTER_ARGUMENT_RULE = ROUTER_FLAGS.rule("router-args-owned")
RouterArgument = Annotated[
    str,
    WithJsonSchema(
        {"type": "string", "maxLength": 4096, "x-kubernetes-validations": [ROUTER_ARGUMENT_RULE.to_object()]}
    ),
]


class RouterAuth(ApiModel):
    """The key that clients of the router present."""

    secret_key_ref: SecretKeySelector = Field(
        description="Where the key is; mounted into the router, never read by the operator."
    )


class ExternalRouter(ApiModel):
    """A router that runs elsewhere; engines are registered with it."""

    url: str = Field(
        max_length=1024, pattern=r"^https?://[^\s/]+$", description="Where it is, e.g. http://router.example:30000."
    )
    credential: str | None = Field(
        default=None,
        max_length=253,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name of the credential, mounted into the operator for this namespace, that the router's worker"
        " API asks for.",
    )


RouterPolicy = Literal[
    "cache_aware",
    "round_robin",
    "random",
    "least_load",
    "manual",
    "consistent_hashing",
    "prefix_hash",
]


class RouterSettings(ApiModel):
    """What concerns a router that the operator runs."""

    replicas: int = Field(default=1, ge=0, le=64, description="Pods of the router; each knows every routable engine.")
    image: str | None = Field(
        default=None,
        max_length=1024,
        description="Image with smg; absent: the one that the operator was installed with.",
    )
    policy: RouterPolicy = Field(
        default="cache_aware", description="How a request's engine is chosen; smg's own terms."
    )
    args: tuple[RouterArgument, ...] = Field(
        default=(),
        max_length=64,
        json_schema_extra=list_type("atomic"),
        description="More smg flags, except those that the operator sets.",
    )
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(), description="Resources of the router's container."
    )
    template: PodOverlay = Field(default=PodOverlay(), description="Laid over the router's pod template.")
    auth: RouterAuth | None = Field(default=None, description="Absent: everyone who reaches the router is served.")


class Router(RouterSettings):
    """What spreads requests over the routable engines: a Deployment of smg, or a router that runs elsewhere."""

    external: ExternalRouter | None = Field(default=None, description="Use this router instead of running one.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "external-router-alone",
            f"!has(self.external) || ({is_default(RouterSettings(), 'self')})",
            "router.external is a router that the operator does not run: remove the other fields of router",
        ),
    )
