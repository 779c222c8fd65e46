"""What kopf is told to leave alone."""

from __future__ import annotations

import kopf

from sglang_rollout.controller.resource_watch import operator_settings


def test_kopf_copies_nothing_of_a_resource() -> None:
    class Untouchable(dict[str, object]):
        def __deepcopy__(self, memo: object) -> object:
            raise AssertionError("a status of hundreds of engines takes milliseconds to copy, at each event")

    body = kopf.Body({"metadata": {}, "spec": Untouchable(), "status": Untouchable()})
    persistence = operator_settings().persistence
    assert persistence.diffbase_storage.fetch(body=body) is None
    essence = persistence.diffbase_storage.build(body=body)
    assert essence == {}
    assert persistence.progress_storage.clear(essence=essence) == {}
