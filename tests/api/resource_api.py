"""SGLangRollouts of a real API server, by plain HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_rollout.api.crd import custom_resource_definition
from sglang_rollout.api.group import CRD_NAME, GROUP, PLURAL, VERSION
from tests.api.objects import Object

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RESOURCES = f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}"
_APPLY = {"Content-Type": "application/apply-patch+yaml"}


@dataclass(frozen=True)
class ResourceApi:
    """Answers are returned as they are, refusals too: tests look at both."""

    http: httpx.Client

    def install_crd(self) -> None:
        """Apply the CRD and wait until it is served."""
        manager = {"fieldManager": "test", "force": "true"}
        response = self.http.patch(
            f"{_CRDS}/{CRD_NAME}", params=manager, headers=_APPLY, json=custom_resource_definition()
        )
        assert response.is_success, response.json()["message"]
        deadline = time.monotonic() + 30
        conditions: list[Object] = []
        while time.monotonic() < deadline:
            conditions = self.http.get(f"{_CRDS}/{CRD_NAME}").json().get("status", {}).get("conditions") or []
            established = any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
            if established and self.http.get(_RESOURCES).is_success:
                return
            time.sleep(0.05)
        raise AssertionError(f"the CRD is not served: {conditions}")

    def create(self, body: Object, *, dry_run: bool = False) -> httpx.Response:
        return self.http.post(_RESOURCES, json=body, params=_dry(dry_run))

    def replace(self, body: Object, *, dry_run: bool = False, subresource: str = "") -> httpx.Response:
        return self.http.put(_path(body["metadata"]["name"], subresource), json=body, params=_dry(dry_run))

    def patch(self, name: str, body: Object, *, subresource: str = "") -> httpx.Response:
        """A JSON merge patch."""
        headers = {"Content-Type": "application/merge-patch+json"}
        return self.http.patch(_path(name, subresource), json=body, headers=headers)

    def apply(
        self, body: Object, *, subresource: str = "", manager: str = "test", force: bool = False
    ) -> httpx.Response:
        """Server-side apply. force: fields of other managers are taken from them."""
        path = _path(body["metadata"]["name"], subresource)
        params = {"fieldManager": manager, "force": str(force).lower()}
        return self.http.patch(path, json=body, params=params, headers=_APPLY)

    def get(self, name: str, *, subresource: str = "") -> httpx.Response:
        return self.http.get(_path(name, subresource))

    def delete(self, name: str) -> httpx.Response:
        return self.http.delete(_path(name))

    def table(self) -> Any:
        """What `kubectl get sgr -o wide` is made from."""
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
        return self.http.get(_RESOURCES, headers={"Accept": accept}).json()

    def openapi(self) -> Any:
        """What `kubectl explain` reads."""
        return self.http.get(f"/openapi/v3/apis/{GROUP}/{VERSION}").json()


def _path(name: str, subresource: str = "") -> str:
    return f"{_RESOURCES}/{name}" + (f"/{subresource}" if subresource else "")


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All", "fieldValidation": "Strict"} if dry_run else {"fieldValidation": "Strict"}
