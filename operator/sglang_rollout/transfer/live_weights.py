"""What a trainer gives to paused engines, bucket by bucket and as often as it is asked: nobody keeps a copy. Needs
torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .comparison import some
from .device_checks import check_flat
from .digests import ALGORITHMS, BLOCK_SUMS
from .host_checks import Checked, check_bucket
from .manifest import Bucket, Manifest
from .outgoing import TensorBucket, buckets_of

AT_HAND = 2  # buckets that are kept, for engines that ask a little later than others

NamedTensors = Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]


class WeightsChanged(Exception):
    """The trainer's tensors are not what they were when the engines were told of them."""


class LiveWeights:
    """`tensors`: by name, or a function that gives (name, tensor) in the same order each time that it is called. They
    must not change until all engines have them: a bucket that is made again must be what it was, or it is refused."""

    def __init__(
        self,
        tensors: NamedTensors,
        bucket_bytes: int | Callable[[Any], int],
        allocate: Callable[[int, Any], Any],
        algorithm: str = "",
    ) -> None:
        """`bucket_bytes`: a function tells it from the first tensor, once. `allocate`: a buffer of so many bytes
        (torch.uint8) on that device, from which they are sent."""
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._allocate = allocate
        self._algorithm = algorithm
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._pass: Iterator[TensorBucket] = iter(())
        self._position = 0
        self._at_hand: dict[int, Any] = {}
        self._over = False
        self.nonfinite: dict[str, int] = {}

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "survey() comes first"
        return self._manifest

    def survey(self) -> Manifest:
        """Looks at every byte once, and keeps the first bucket, which is asked for first. Blocks. Raises
        ManifestRefused."""
        buckets: list[Bucket] = []
        for one in self._buckets():
            flat = self._flat(one)
            if not buckets:
                self._at_hand[0] = flat
            self._algorithm = self._algorithm or (BLOCK_SUMS if flat.is_cuda else next(iter(ALGORITHMS)))
            checked = _check(flat, one.bucket, self._algorithm)
            self.nonfinite |= checked.nonfinite
            buckets.append(Bucket(one.bucket.tensors, checked.digest))
        self._manifest = Manifest(tuple(buckets), self._algorithm)
        return self._manifest

    def nonfinite_words(self) -> str:
        return some(f"{name} ({count})" for name, count in self.nonfinite.items())

    def flat(self, number: int) -> Any:
        """The bytes of one bucket, not to be changed. Blocks; from any thread. Raises WeightsChanged."""
        try:
            with self._lock:
                if self._over:
                    raise WeightsChanged("these weights are not given any more: the trainer may write its tensors")
                if number not in self._at_hand:
                    self._at_hand = {n: flat for n, flat in self._at_hand.items() if abs(n - number) < AT_HAND}
                    try:
                        self._at_hand[number] = self._make(number)
                    except BaseException:
                        self._position = 0  # whoever asks next begins anew
                        raise
                return self._at_hand[number]
        finally:
            if self._over:
                self._let_go()

    def forget(self) -> None:
        """Lets go of what is at hand: nobody gets it any more. Does not block: a thread that makes a bucket, which may
        be in an iterator of the trainer's, lets go of it by itself."""
        self._over = True
        self._let_go()

    def _let_go(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._at_hand, self._pass, self._position = {}, iter(()), 0
            finally:
                self._lock.release()

    def _make(self, number: int) -> Any:
        if number < self._position or self._position == 0:
            self._pass, self._position = self._buckets(), 0
        wanted = self.manifest.buckets[number]
        for one in self._pass:
            self._position += 1
            if self._position <= number:
                continue
            if one.bucket.tensors != wanted.tensors:
                raise WeightsChanged(f"the trainer gave other tensors in bucket {number} than at first")
            flat = self._flat(one)
            if _check(flat, one.bucket, self._algorithm).digest != wanted.digest:
                names = some(tensor.name for tensor in wanted.tensors)
                raise WeightsChanged(f"the values of {names} changed while they were being sent")
            return flat
        raise WeightsChanged(f"the trainer gave {self._position} buckets, and {len(self.manifest.buckets)} at first")

    def _buckets(self) -> Iterator[TensorBucket]:
        """Raises ManifestRefused."""
        named = self._tensors.items() if isinstance(self._tensors, Mapping) else self._tensors()
        return buckets_of(named, self._size)

    def _size(self, first: Any) -> int:
        """The same each time: free memory is not."""
        if callable(self._bucket_bytes):
            self._bucket_bytes = self._bucket_bytes(first)
        return self._bucket_bytes

    def _flat(self, bucket: TensorBucket) -> Any:
        into = self._allocate(bucket.bucket.size, bucket.device)
        bucket.write_flat(into)
        return into


def _check(flat: Any, bucket: Bucket, algorithm: str) -> Checked:
    """Where the bytes are, if that is possible."""
    if flat.is_cuda and algorithm == BLOCK_SUMS:
        return check_flat(flat, bucket, algorithm)
    return check_bucket(memoryview(flat.cpu().numpy()), bucket, algorithm)
