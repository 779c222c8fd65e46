"""Security contexts: what Pod Security `restricted` asks for, as far as an image allows it."""

from __future__ import annotations

from typing import Any

# Our own images run as this user.
USER = 65532

_SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}

# For images of the user, which may be made to run as root: all of `restricted` but runAsNonRoot. An overlay that
# sets securityContext.runAsNonRoot and runAsUser makes such a pod restricted.
UNPRIVILEGED_POD: dict[str, Any] = dict(_SECCOMP)
UNPRIVILEGED_CONTAINER: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

RESTRICTED_POD: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    **_SECCOMP,
}
RESTRICTED_CONTAINER: dict[str, Any] = {
    **UNPRIVILEGED_CONTAINER,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "readOnlyRootFilesystem": True,
}
