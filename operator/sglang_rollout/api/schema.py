"""What the models of the resource are made of: camelCase names, admission rules in CEL, and leaf types whose
schema the API server accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class Rule:
    """One CEL rule (x-kubernetes-validations) of the object it is declared on.

    id: unique over the resource; tests and docs name the rule by it, the CRD does not carry it.
    expression: CEL over `self` (and `oldSelf`: then it is checked on updates only).
    message: what to write instead.
    """

    id: str
    expression: str
    message: str

    def to_object(self) -> dict[str, str]:
        return {"rule": self.expression, "message": self.message}


_INITIALISMS = {"Id": "ID", "Uid": "UID", "Uids": "UIDs"}


def field_alias(name: str) -> str:
    """The JSON name of a Python field: camelCase, with Kubernetes' capitals for ID and UID."""
    head, *rest = name.rstrip("_").split("_")
    return head + "".join(_INITIALISMS.get(word.capitalize(), word.capitalize()) for word in rest)


class ApiModel(BaseModel):
    """A part of the resource. Unknown fields are ignored, so that an operator older than the CRD still runs;
    the API server has already pruned what the CRD does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=field_alias, populate_by_name=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.to_object() for rule in cls.rules]
        return schema

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> Self:
        """From the JSON of the API server. Raises pydantic.ValidationError, whose text names each wrong field."""
        return cls.model_validate(value)

    def to_object(self) -> dict[str, Any]:
        """As JSON for the API server; what is absent is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OpenModel(ApiModel):
    """An object of Kubernetes' own that we type only where a rule looks; the rest passes through unchanged."""

    model_config = ConfigDict(extra="allow")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        schema["x-kubernetes-preserve-unknown-fields"] = True
        return schema


# The pattern of k8s.io/apimachinery's resource.Quantity, as controller-gen writes it into CRDs.
_QUANTITY_PATTERN = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY_PATTERN,
            "maxLength": 64,
        }
    ),
]

# An object of Kubernetes' own, passed on as it is.
Opaque = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]

# RFC 3339, as Kubernetes writes it.
Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]

LABEL_MAX = 63
Text = Annotated[str, Field(max_length=1024)]
RequestID = Annotated[str, Field(min_length=1, max_length=128)]


def list_type(kind: str, *keys: str) -> dict[str, Any]:
    """json_schema_extra for a list: "atomic", "set", or "map" with its keys (server-side apply merges by it)."""
    extra: dict[str, Any] = {"x-kubernetes-list-type": kind}
    if keys:
        extra["x-kubernetes-list-map-keys"] = list(keys)
    return extra
