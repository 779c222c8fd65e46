"""Signing keys and ServiceAccount tokens of a pretended cluster, and the fleet file that trusts them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import hashes, hmac, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sglang_rollout.protocol.fleet import FleetConfig, Trust, audience
from sglang_rollout.protocol.weights import WeightVersion
from sglang_rollout.protocol.wire import dumps

AUDIENCE = audience("uid-1")
ISSUER = "https://kubernetes.default.svc.cluster.local"
OPERATOR = "system:serviceaccount:sglang-rollout:operator"


class ClusterKey:
    """A key that kube-apiserver signs tokens with."""

    def __init__(self, kid: str, algorithm: str = "RS256") -> None:
        self.kid = kid
        self.algorithm = algorithm
        self._private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
        if algorithm.startswith("RS"):
            self._private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        else:
            self._private = ec.generate_private_key(ec.SECP256R1())

    def jwk(self) -> dict[str, Any]:
        public = self._private.public_key()
        written = RSAAlgorithm.to_jwk(public) if isinstance(public, rsa.RSAPublicKey) else ECAlgorithm.to_jwk(public)
        return {**json.loads(written), "kid": self.kid, "use": "sig", "alg": self.algorithm}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Claims of a good token for the operator; a change to None leaves the claim out."""
        now = int(time.time())
        good = {"aud": [AUDIENCE], "iss": ISSUER, "sub": OPERATOR, "iat": now, "nbf": now, "exp": now + 600}
        return {name: value for name, value in {**good, **changes}.items() if value is not None}

    def token(self, **changes: Any) -> str:
        return jwt.encode(self.claims(**changes), self._private, algorithm=self.algorithm, headers={"kid": self.kid})

    def unsigned_token(self) -> str:
        return jwt.encode(self.claims(), "", algorithm="none", headers={"kid": self.kid})

    def token_signed_with_the_public_key(self) -> str:
        """The classic confusion: an HMAC whose secret is the public key that everyone knows."""
        public = self._private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        parts = [{"alg": "HS256", "typ": "JWT", "kid": self.kid}, self.claims()]
        signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        code = hmac.HMAC(public, hashes.SHA256())
        code.update(signed.encode())
        return f"{signed}.{_base64(code.finalize())}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def write_fleet_file(path: Path, keys: Sequence[ClusterKey], more: Sequence[Any] = ()) -> FleetConfig:
    """Writes it the way the kubelet does: a new file takes the place of the old one."""
    config = FleetConfig(
        namespace="team-a",
        name="fleet",
        uid="uid-1",
        boot=WeightVersion("1", "/models/1"),
        trust=Trust(AUDIENCE, ISSUER, [OPERATOR], {"keys": [*more, *(key.jwk() for key in keys)]}),
    )
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(dumps(config))
    fresh.replace(path)
    return config
