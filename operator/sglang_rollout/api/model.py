"""spec.model: what the engines are started with."""

from __future__ import annotations

from pydantic import Field

from .schema import ApiModel, Opaque


class Model(ApiModel):
    """The model that the engines start with."""

    path: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[^-\s]",
        description="Folder of the checkpoint inside the engine's container, or a hub id.",
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Name that clients call the model by; absent: the path. It stays over weight updates.",
    )
    volume: Opaque | None = Field(
        default=None, description="Any core/v1 volume source that holds checkpoints; mounted read-only at mountPath."
    )
    mount_path: str = Field(
        default="/models",
        max_length=1024,
        pattern=r"^/[^:]*$",
        description="Where the volume is mounted in the containers of the engine's pods.",
    )
