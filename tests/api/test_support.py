"""What is accepted but not done yet is reported, field by field; defaults report nothing."""

from __future__ import annotations

import pytest

from sglang_rollout.api import Spec, unsupported_fields
from sglang_rollout.api.support import unsupported_message, unsupported_paths
from tests.api.objects import Object, rollout

DISK = {"type": "Disk", "disk": {"path": "/models/2"}}

USES: list[tuple[str, Object]] = [
    ("spec.scheduling.gang", {"scheduling": {"gang": {"mode": "PodGroup"}}}),
    ("spec.scheduling.topology", {"scheduling": {"topology": {"key": "rack", "policy": "Pack"}}}),
    ("spec.scheduling.queueName", {"scheduling": {"queueName": "q"}}),
]


@pytest.mark.parametrize(("path", "use"), USES, ids=lambda value: value if isinstance(value, str) else "")
def test_use_is_reported(path: str, use: Object) -> None:
    found = unsupported_fields(Spec.from_object(rollout(**use)["spec"]))

    assert [field.path for field in found] == [path]
    assert f"{path} ({found[0].reason})" in unsupported_message(found)


def test_every_row_is_tried() -> None:
    assert {path for path, _ in USES} == set(unsupported_paths())


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"weights": {"version": "2", "source": DISK, "updateStrategy": {"type": "Rolling"}}},
        {"execution": {"state": "Paused", "pauseMode": "InPlace"}, "restart": {"requestID": "1"}},
        {"scheduling": {"schedulerName": "kai"}, "network": {"hostNetwork": True, "trainers": [{"podSelector": {}}]}},
        {
            "memory": {
                "weights": "Released",
                "kvCache": "Released",
                "cudaGraph": "Released",
                "weightsBackup": "HostMemory",
            }
        },
        {"weightCheck": {"requestID": "1", "action": "Compare"}, "profile": {"requestID": "1"}},
        {"control": "External"},
        {"agent": {"gpuAccess": {"type": "VisibleDevices"}, "staging": {"medium": "Device"}}},
        {"weights": {"version": "2", "source": {"type": "Distributed", "distributed": {}}}},
        {"weights": {"version": "2", "source": {"type": "External"}, "verify": "Checksum"}},
        {"weights": {"prepare": {"version": "2", "source": DISK}}, "agent": {"staging": {"versions": 2}}},
        {"router": {"external": {"url": "http://router.example:30000"}}},
    ],
)
def test_what_is_done_is_not_reported(spec: Object) -> None:
    assert unsupported_fields(Spec.from_object(rollout(**spec)["spec"])) == []
