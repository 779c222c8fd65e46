"""The parts of core/v1 and networking/v1 objects that appear in the resource."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from .schema import LABEL_MAX, ApiModel, Opaque, Quantity, Rule, list_type

Labels = Annotated[dict[str, Annotated[str, Field(max_length=LABEL_MAX)]], Field(max_length=64)]


class ResourceClaimRef(ApiModel):
    """A claim of the pod that a container uses (core/v1 ResourceClaim)."""

    name: str = Field(max_length=253, description="Name of an entry of the pod's spec.resourceClaims.")
    request: str | None = Field(
        default=None,
        max_length=253,
        description="One request of the claim; absent: everything the claim makes available.",
    )


class ResourceRequirements(ApiModel):
    """CPU, memory and devices of one container (core/v1 ResourceRequirements)."""

    limits: dict[str, Quantity] | None = Field(
        default=None, max_length=64, description="The most that the container may use, by resource name."
    )
    requests: dict[str, Quantity] | None = Field(
        default=None, max_length=64, description="What is reserved for the container, by resource name."
    )
    claims: tuple[ResourceClaimRef, ...] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra=list_type("map", "name"),
        description="Claims of the pod (dynamic resource allocation) that the container uses.",
    )


class EnvVar(ApiModel):
    """An environment variable (core/v1 EnvVar)."""

    name: str = Field(min_length=1, max_length=253, description="Name of the variable.")
    value: str | None = Field(default=None, max_length=32768, description="Its value.")
    value_from: Opaque | None = Field(
        default=None, description="Where its value comes from: a core/v1 EnvVarSource (secretKeyRef, fieldRef, ...)."
    )


class SecretKeySelector(ApiModel):
    """A key of a Secret in the resource's namespace (core/v1 SecretKeySelector)."""

    name: str = Field(min_length=1, max_length=253, description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, description="Key in the Secret.")


class LabelSelectorRequirement(ApiModel):
    """One condition on a label (meta/v1 LabelSelectorRequirement)."""

    key: str = Field(max_length=317, description="Label that is looked at.")
    operator: str = Field(max_length=32, description="In, NotIn, Exists or DoesNotExist.")
    values: tuple[Annotated[str, Field(max_length=LABEL_MAX)], ...] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra=list_type("atomic"),
        description="Values for In and NotIn.",
    )


class LabelSelector(ApiModel):
    """Objects chosen by their labels (meta/v1 LabelSelector); an empty one chooses all."""

    match_labels: Labels | None = Field(default=None, description="Labels that must all be there with these values.")
    match_expressions: tuple[LabelSelectorRequirement, ...] | None = Field(
        default=None,
        max_length=32,
        json_schema_extra=list_type("atomic"),
        description="Conditions that must all hold.",
    )


class IPBlock(ApiModel):
    """A range of addresses (networking/v1 IPBlock)."""

    cidr: str = Field(max_length=64, description="The range, e.g. 10.0.0.0/8.")
    except_: tuple[Annotated[str, Field(max_length=64)], ...] | None = Field(
        default=None,
        max_length=64,
        json_schema_extra=list_type("atomic"),
        description="Ranges inside it that are left out.",
    )


class NetworkPolicyPeer(ApiModel):
    """Who may connect (networking/v1 NetworkPolicyPeer)."""

    pod_selector: LabelSelector | None = Field(
        default=None, description="Pods by label, in the namespaces of namespaceSelector, else in the fleet's own."
    )
    namespace_selector: LabelSelector | None = Field(default=None, description="Namespaces by label.")
    ip_block: IPBlock | None = Field(default=None, description="Addresses; excludes the selectors.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "trainer-peer",
            "has(self.ipBlock) != (has(self.podSelector) || has(self.namespaceSelector))",
            "a peer is either an ipBlock or a podSelector and/or namespaceSelector: write one of the two",
        ),
    )
