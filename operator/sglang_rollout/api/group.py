"""Where the resource lives in the Kubernetes API."""

from __future__ import annotations

GROUP = "rollout.sglang.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "SGLangRollout"
LIST_KIND = f"{KIND}List"
PLURAL = "sglangrollouts"
SINGULAR = "sglangrollout"
SHORT_NAME = "sgr"
CRD_NAME = f"{PLURAL}.{GROUP}"
