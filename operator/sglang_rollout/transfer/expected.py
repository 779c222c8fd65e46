"""Whether what a trainer sends is what the running model takes, bucket by bucket before its bytes come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .comparison import differences, some
from .manifest import Bucket, ManifestRefused, Tensor, bucket_of


class Expected:
    """`reference`: the running model's tensors; None: nothing is known of them, all is taken. `tied_names` may be
    there or not."""

    def __init__(self, reference: Mapping[str, Tensor] | None, tied_names: frozenset[str]) -> None:
        self._reference = reference
        self._tied = tied_names
        self._came: set[str] = set()

    def admit(self, bucket: Bucket) -> None:
        """Raises ManifestRefused with the tensor's name."""
        names = [tensor.name for tensor in bucket.tensors]
        if not names:
            raise ManifestRefused("a bucket without tensors was sent")
        counted = Counter(names)
        if twice := sorted(name for name, count in counted.items() if count > 1 or name in self._came):
            raise ManifestRefused(f"tensor {some(twice)} was sent twice: send each name once")
        if bucket_of(bucket.tensors) != Bucket(bucket.tensors):
            raise ManifestRefused(f"bucket of tensor {names[0]} is not in descending order of item sizes")
        if self._reference is not None:
            offered = {tensor.name: tensor for tensor in bucket.tensors}
            running = {name: self._reference[name] for name in names if name in self._reference}
            if wrong := differences(offered, running, optional=self._tied, subject="the sent weights"):
                raise ManifestRefused("; ".join(wrong))
        self._came.update(names)

    def complete(self) -> None:
        """Raises ManifestRefused when a tensor of the running model has not come."""
        if not self._came:
            raise ManifestRefused("no tensors were sent: send all tensors of the model")
        missing = sorted(set(self._reference or ()) - self._came - self._tied)
        if missing:
            raise ManifestRefused(f"the sent weights lack {some(missing)}, which the running model has")
