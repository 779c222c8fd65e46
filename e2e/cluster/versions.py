"""Every version the cluster is made of. Cache folders are keyed by these, so a change here rebuilds what it touches."""

from __future__ import annotations

KUBERNETES = "v1.34.4"
"""Kubernetes of a node image built here; kind's own image has the patch level of `KIND_NODE_IMAGE`."""
KIND = "v0.30.0"
HELM = "v3.22.0"
ETCD = "v3.6.5"
COREDNS = "v1.12.1"
CONTAINERD = "v2.1.4"
CNI_PLUGINS = "v1.7.1"
CRICTL = "v1.34.0"
LOCAL_PATH_PROVISIONER = "v0.0.30"
PAUSE = "3.10.1"
DEBIAN_SUITE = "bookworm"

GO_MINIMUM = (1, 26)
"""Helm's go.mod asks for it; Kubernetes alone would do with 1.24."""

KIND_NODE_IMAGE = "kindest/node:v1.34.0@sha256:7416a61b42b1662ca6ca89f02028ac133a309a2a30ba309614e8ec94d976dc5a"
"""The default of kind v0.30.0 (pkg/apis/config/defaults/image.go)."""

# What kubeadm and kind ask for by name. A node image that lacks one of them would try to pull it.
KUBERNETES_REGISTRY = "registry.k8s.io"
ETCD_IMAGE = f"{KUBERNETES_REGISTRY}/etcd:3.6.5-0"
COREDNS_IMAGE = f"{KUBERNETES_REGISTRY}/coredns/coredns:{COREDNS}"
PAUSE_IMAGE = f"{KUBERNETES_REGISTRY}/pause:{PAUSE}"
KINDNETD_IMAGE = "docker.io/kindest/kindnetd:v20250512-df8de77b"
LOCAL_PATH_IMAGE = "docker.io/kindest/local-path-provisioner:v20250214-acbabc1a"
LOCAL_PATH_HELPER_IMAGE = "docker.io/kindest/local-path-helper:v20241212-8ac705d0"

DEBIAN_IMAGE = "debian:bookworm-slim"
"""The base that the shipped Dockerfiles start from; made here only where it cannot be pulled."""
PROBE_IMAGE = "busybox:1.37"
"""What `verify` runs in its pods."""
