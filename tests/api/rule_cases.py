"""For every admission rule: what it accepts and what it refuses, one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.api.objects import Object

DISK_1 = {"type": "Disk", "disk": {"path": "/models/step-1"}}
DISK_2 = {"type": "Disk", "disk": {"path": "/models/step-2"}}
GLOO = {"type": "Distributed", "distributed": {"transport": "Gloo", "senders": [{"address": "a", "port": 1}]}}
GLOO_MOVED = {"type": "Distributed", "distributed": {"transport": "Gloo", "senders": [{"address": "b", "port": 2}]}}
NCCL = {"type": "Distributed", "distributed": {"transport": "NCCL"}}
DIRECT = {"type": "Distributed", "distributed": {"transfer": "Direct"}}
COLOCATED = {"type": "Colocated", "colocated": {"senders": [{"address": "10.0.0.7", "port": 29600}]}}
CLAIM, VISIBLE = {"type": "ResourceClaim"}, {"type": "VisibleDevices"}
UNSTAGED = {"agent": {"staging": {"medium": "None"}}}
RELEASED = {"weights": "Released", "kvCache": "Released", "cudaGraph": "Released"}
PAUSED = {"state": "Paused"}


@dataclass(frozen=True)
class Case:
    """rule: its id; path: where, for rules that apply in several places. spec: laid over the minimal resource;
    before: what the resource was (an update), else the case is a creation. name: metadata.name."""

    rule: str
    accepted: bool
    spec: Object
    before: Object | None = None
    path: str = ""
    name: str = "fleet"

    @property
    def title(self) -> str:
        return f"{self.path or self.rule}-{'accepts' if self.accepted else 'refuses'}"


def accepts(rule: str, spec: Object | None = None, **options: Any) -> Case:
    return Case(rule, True, spec or {}, **options)


def refuses(rule: str, spec: Object | None = None, **options: Any) -> Case:
    return Case(rule, False, spec or {}, **options)


def engine(**fields: Any) -> Object:
    return {"engine": fields}


def weights(**fields: Any) -> Object:
    return {"weights": fields}


NAMES = [
    accepts("name-length", name="a" * 40),
    refuses("name-length", name="a" * 41),
    accepts("name-dns-1035", name="qwen3-8b"),
    refuses("name-dns-1035", name="8b-x"),
    refuses("name-dns-1035", name="qwen3.5-8b"),
]

ENGINE = [
    accepts("nodes-immutable", engine(nodes=2, tensorParallelSize=4), before=engine(nodes=2, tensorParallelSize=2)),
    accepts("nodes-immutable", engine(nodes=1), before={}),
    refuses("nodes-immutable", engine(nodes=2, tensorParallelSize=2), before=engine(nodes=1, tensorParallelSize=2)),
    refuses("nodes-immutable", engine(tensorParallelSize=2), before=engine(nodes=2, tensorParallelSize=2)),
    accepts("ranks-divide-over-nodes", engine(nodes=2, tensorParallelSize=16)),
    accepts("ranks-divide-over-nodes", engine(nodes=4, tensorParallelSize=2, pipelineParallelSize=2)),
    refuses("ranks-divide-over-nodes", engine(nodes=2)),
    refuses("ranks-divide-over-nodes", engine(nodes=4, tensorParallelSize=6)),
    accepts(
        "data-parallel-attention",
        engine(tensorParallelSize=4, dataParallelSize=2, args=["--enable-dp-attention"]),
    ),
    refuses("data-parallel-attention", engine(tensorParallelSize=4, dataParallelSize=2)),
    accepts(
        "data-parallel-divides",
        engine(tensorParallelSize=4, dataParallelSize=4, args=["--enable-dp-attention"]),
    ),
    refuses(
        "data-parallel-divides",
        engine(tensorParallelSize=4, dataParallelSize=3, args=["--enable-dp-attention"]),
    ),
    accepts("engine-args-owned", engine(args=["--mem-fraction-static=0.8", "--context-length", "4096"])),
    accepts("engine-args-owned", engine(args=["--json-model-override-args", '{"host": "--", "a": "-1 --host"}'])),
    accepts("engine-args-owned", engine(args=["--hostile", "--model-impl=auto", "--tokenizer-path", "/models/t"])),
    *(
        refuses("engine-args-owned", engine(args=["--log-level", "info", argument]))
        for argument in (
            "--model-path",
            "--model-path=/models/x",
            "--model-path /models/x",
            "--model=/models/x",
            "--model-pa",
            "--host=0.0.0.0",
            "--hos",
            "--port",
            "--tp",
            "--tp=2",
            "--tp-size",
            "--tensor-parallel-size",
            "--tensor",
            "--pp-size=2",
            "--pipeline-parallel-size",
            "--dp-size=2",
            "--data-parallel-size",
            "--attn-dp-size=2",
            "--ep",
            "--ep-size",
            "--expert-parallel-size",
            "--nnodes",
            "--nn=2",
            "--node-rank",
            "--dist-init-addr=x:1",
            "--dist-init",
            "--nccl-init-addr",
            "--weight-version=7",
            "--weight-v",
            "--enable-memory-saver",
            "--enable-weights-cpu-backup",
            "--custom-weight-loader=x",
            "--api-key=k",
            "--admin-api-key=k",
            "--admin",
            "--config=/x.yaml",
            "--conf",
            "--tokenizer-worker-num=2",
            "--served-model-name=x",
            "--ssl-keyfile=x",
            "--grpc-mode",
            "--",
        )
    ),
]

AGENT = [
    accepts("device-stage-needs-gpu", {"agent": {"staging": {"medium": "Device"}, "gpuAccess": VISIBLE}}),
    refuses("device-stage-needs-gpu", {"agent": {"staging": {"medium": "Device"}}}),
    accepts("claim-is-named", {"agent": {"gpuAccess": CLAIM, "resources": {"claims": [{"name": "gpus"}]}}}),
    accepts("claim-is-named", {"agent": {"gpuAccess": VISIBLE}}),
    refuses("claim-is-named", {"agent": {"gpuAccess": CLAIM}}),
    refuses("claim-is-named", {"agent": {"gpuAccess": CLAIM, "resources": {"claims": []}}}),
]

ROUTER = [
    accepts("external-router-alone", {"router": {"external": {"url": "http://router.example:30000"}}}),
    accepts("external-router-alone", {"router": {"replicas": 2, "policy": "round_robin", "args": ["--log-json"]}}),
    *(
        refuses("external-router-alone", {"router": {"external": {"url": "http://router.example:30000"}, **more}})
        for more in (
            {"replicas": 2},
            {"policy": "random"},
            {"image": "smg"},
            {"args": ["--log-json"]},
            {"resources": {"limits": {"cpu": 1}}},
            {"template": {"metadata": {"labels": {"a": "b"}}}},
            {"auth": {"secretKeyRef": {"name": "router", "key": "api-key"}}},
        )
    ),
    accepts("router-args-owned", {"router": {"args": ["--cache-threshold=0.5", "--log-level", "debug"]}}),
    *(
        refuses("router-args-owned", {"router": {"args": [argument]}})
        for argument in ("--host", "--policy=random", "--worker-urls", "--worker-u", "--disable-health", "--api-key=x")
    ),
]


OWN_POD_FIELDS: tuple[Object, ...] = (
    {"restartPolicy": "Never"},
    {"hostname": "x"},
    {"subdomain": "x"},
    {"hostNetwork": True},
    {"schedulerName": "x"},
    {"shareProcessNamespace": True},
)
OWN_CONTAINER_FIELDS: tuple[Object, ...] = (
    {"image": "other"},
    {"command": ["sh"]},
    {"args": ["-c"]},
    {"ports": [{"containerPort": 1}]},
    {"livenessProbe": {"httpGet": {"path": "/", "port": 1}}},
    {"readinessProbe": {}},
    {"startupProbe": {}},
    {"lifecycle": {}},
)


def _overlay_cases() -> list[Case]:
    cases: list[Case] = []
    for owner in ("engine", "router"):

        def overlay(owner: str = owner, **template: Any) -> Object:
            return {owner: {"template": template}}

        labels = f"spec.{owner}.template.metadata"
        cases += [
            accepts("overlay-labels", overlay(metadata={"labels": {"team": "rl"}}), path=labels),
            accepts("overlay-labels", overlay(metadata={"annotations": {"a": "b"}}), path=labels),
            refuses("overlay-labels", overlay(metadata={"labels": {"rollout.sglang.io/fleet": "x"}}), path=labels),
            refuses("overlay-labels", overlay(metadata={"labels": {"app.kubernetes.io/name": "x"}}), path=labels),
        ]
        pod = f"spec.{owner}.template.spec"
        cases.append(accepts("overlay-pod", overlay(spec={"nodeSelector": {"gpu": "h200"}}), path=pod))
        cases += [refuses("overlay-pod", overlay(spec=fields), path=pod) for fields in OWN_POD_FIELDS]
        for kind, own in (("containers", owner), ("initContainers", "agent")):
            path = f"{pod}.{kind}[]"
            volume_mount = {"name": own, "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
            cases += [
                accepts("overlay-container", overlay(spec={kind: [volume_mount]}), path=path),
                accepts(
                    "overlay-container",
                    overlay(spec={kind: [{"name": "mine", "image": "busybox", "command": ["sleep"]}]}),
                    path=path,
                ),
            ]
            cases += [
                refuses("overlay-container", overlay(spec={kind: [{"name": own, **fields}]}), path=path)
                for fields in OWN_CONTAINER_FIELDS
            ]
    return cases


STATE = [
    accepts("running-is-resident", {"execution": {"state": "Running"}}),
    accepts("running-is-resident", {"execution": PAUSED, "memory": {"kvCache": "Released"}}),
    *(
        refuses("running-is-resident", {"memory": memory})
        for memory in ({"kvCache": "Released"}, {"cudaGraph": "Released"}, {**RELEASED, "weightsBackup": "HostMemory"})
    ),
    accepts("weights-released-last", {"execution": PAUSED, "memory": {**RELEASED, "weightsBackup": "HostMemory"}}),
    *(
        refuses(
            "weights-released-last",
            {"execution": PAUSED, "memory": {**RELEASED, "weightsBackup": "HostMemory", kept: "Resident"}},
        )
        for kept in ("kvCache", "cudaGraph")
    ),
    accepts(
        "released-weights-come-back",
        {"execution": PAUSED, "memory": RELEASED, **weights(version="1", source=DISK_1)},
    ),
    refuses("released-weights-come-back", {"execution": PAUSED, "memory": RELEASED}),
    accepts("pipeline-not-paused", {"engine": {"pipelineParallelSize": 2}}),
    accepts("pipeline-not-paused", {"execution": PAUSED}),
    refuses("pipeline-not-paused", {"engine": {"pipelineParallelSize": 2}, "execution": PAUSED}),
    accepts("pipeline-not-released", {"execution": PAUSED, "memory": {"cudaGraph": "Released"}}),
    *(
        Case("pipeline-not-released", False, {"engine": {"pipelineParallelSize": 2}, "memory": {tag: "Released"}})
        for tag in ("kvCache", "cudaGraph")
    ),
    accepts("pipeline-moves-by-disk", {"engine": {"pipelineParallelSize": 2}, **weights(version="1", source=DISK_1)}),
    refuses("pipeline-moves-by-disk", {"engine": {"pipelineParallelSize": 2}, **weights(version="1", source=NCCL)}),
    refuses(
        "pipeline-moves-by-disk",
        {"engine": {"pipelineParallelSize": 2}, **weights(prepare={"version": "2", "source": DISK_2})},
    ),
]

WEIGHTS = [
    accepts("version-is-a-label", weights(version="step 42, default")),
    refuses("version-is-a-label", weights(version="default")),
    accepts("source-needs-version", weights(version="1", source=DISK_1)),
    refuses("source-needs-version", weights(source=DISK_1)),
    accepts("in-place-keeps-cache", weights(pauseMode="InPlace", kvCache="Keep")),
    accepts("in-place-keeps-cache", weights(pauseMode="Abort", kvCache="Flush")),
    refuses("in-place-keeps-cache", weights(pauseMode="InPlace")),
    accepts("source-disk", weights(version="1", source=DISK_1), path="spec.weights.source"),
    refuses("source-disk", weights(version="1", source={"type": "Disk"}), path="spec.weights.source"),
    refuses("source-disk", weights(version="1", source={**DISK_1, "type": "Colocated"}), path="spec.weights.source"),
    accepts("source-distributed", weights(version="1", source=NCCL), path="spec.weights.source"),
    accepts("source-distributed", weights(version="1", source={"type": "External"}), path="spec.weights.source"),
    refuses("source-distributed", weights(version="1", source={"type": "Distributed"}), path="spec.weights.source"),
    refuses(
        "source-distributed",
        weights(version="1", source={**DISK_1, "distributed": {}}),
        path="spec.weights.source",
    ),
    accepts("source-colocated", weights(version="1", source=COLOCATED), path="spec.weights.source"),
    refuses("source-colocated", weights(version="1", source={"type": "Colocated"}), path="spec.weights.source"),
    refuses(
        "source-colocated",
        weights(version="1", source={**COLOCATED, **DISK_1}),
        path="spec.weights.source",
    ),
    *(
        Case(rule, ok, weights(prepare={"version": "2", "source": source}), path="spec.weights.prepare.source")
        for rule, ok, source in (
            ("source-disk", True, DISK_2),
            ("source-disk", False, {"type": "Disk"}),
            ("source-distributed", True, NCCL),
            ("source-distributed", False, {"type": "Distributed"}),
            ("source-colocated", True, DISK_2),
            ("source-colocated", False, {"type": "Colocated"}),
        )
    ),
    *(accepts("prepared-is-staged", weights(prepare={"version": "2", "source": source})) for source in (DISK_2, NCCL)),
    *(
        refuses("prepared-is-staged", weights(prepare={"version": "2", "source": source}))
        for source in (DIRECT, COLOCATED, {"type": "External"})
    ),
    *(
        accepts("staged-needs-stage", {**UNSTAGED, **weights(version="1", source=source)})
        for source in (DISK_1, DIRECT, COLOCATED, {"type": "External"})
    ),
    accepts("staged-needs-stage", weights(version="1", source=NCCL)),
    refuses("staged-needs-stage", {**UNSTAGED, **weights(version="1", source=NCCL)}),
    refuses("staged-needs-stage", {**UNSTAGED, **weights(prepare={"version": "1", "source": DISK_1})}),
    accepts("rolling-needs-lag", {**weights(updateStrategy={"type": "Rolling"}), "staleness": {"maxVersionLag": 1}}),
    refuses("rolling-needs-lag", weights(updateStrategy={"type": "Rolling"})),
]


def _version_cases() -> list[Case]:
    rule = "version-names-its-source"
    prepared = "prepared-version-names-its-source"
    disk_1 = weights(version="1", source=DISK_1)
    gloo = weights(version="1", source=GLOO)
    prepare_2 = weights(prepare={"version": "2", "source": DISK_2})
    return [
        accepts(rule, weights(version="2", source=DISK_2), before=disk_1),
        accepts(rule, weights(version="1", source=DISK_1), before={}),
        accepts(rule, {}, before=disk_1),
        accepts(rule, {**disk_1, "replicas": 2}, before=disk_1),
        accepts(rule, weights(version="1", source=GLOO_MOVED), before=gloo),
        refuses(rule, weights(version="1", source=DISK_2), before=disk_1),
        refuses(rule, weights(version="1", source=GLOO), before=disk_1),
        refuses(rule, weights(version="1", source=NCCL), before=gloo),
        refuses(rule, weights(version="1"), before=disk_1),
        refuses(rule, weights(version="1", source=DISK_1), before=weights(version="1")),
        accepts(prepared, weights(prepare={"version": "3", "source": DISK_1}), before=prepare_2),
        accepts(prepared, {}, before=prepare_2),
        accepts(prepared, {**prepare_2, "replicas": 3}, before=prepare_2),
        refuses(prepared, weights(prepare={"version": "2", "source": DISK_1}), before=prepare_2),
        accepts(
            "prepared-source-is-committed",
            weights(version="2", source=DISK_2, prepare={"version": "2", "source": DISK_2}),
        ),
        accepts("prepared-source-is-committed", weights(version="1", prepare={"version": "2", "source": DISK_2})),
        refuses(
            "prepared-source-is-committed",
            weights(version="2", source=DISK_1, prepare={"version": "2", "source": DISK_2}),
        ),
        refuses("prepared-source-is-committed", weights(version="2", prepare={"version": "2", "source": DISK_2})),
        accepts("committed-as-prepared", weights(version="2", source=DISK_2), before=prepare_2),
        accepts("committed-as-prepared", weights(version="3", source=DISK_1), before=prepare_2),
        refuses("committed-as-prepared", weights(version="2", source=DISK_1), before=prepare_2),
        refuses("committed-as-prepared", weights(version="2"), before=prepare_2),
    ]


def _boot_cases() -> list[Case]:
    rule = "boot-version-names-its-path"
    other = {"model": {"path": "/models/other"}}
    return [
        accepts(rule, {**other, **weights(version="2")}, before=weights(version="1")),
        accepts(rule, {**other, **weights(version="2")}, before={}),
        accepts(rule, {**other, **weights(version="1", source=DISK_1)}, before=weights(version="1", source=DISK_1)),
        accepts(rule, {**other, "control": "External"}, before={"control": "External"}),
        accepts(rule, {"replicas": 2}, before={}),
        refuses(rule, {**other, **weights(version="1")}, before=weights(version="1")),
        refuses(rule, other, before={}),
        refuses(rule, other, before=weights(version="1")),
    ]


CONTROL = [
    accepts("external-control-execution", {"control": "External"}),
    accepts("external-control-execution", {"execution": PAUSED}),
    refuses("external-control-execution", {"control": "External", "execution": PAUSED}),
    refuses("external-control-execution", {"control": "External", "execution": {"pauseMode": "Abort"}}),
    accepts("external-control-memory", {"control": "External", "memory": {"weights": "Resident"}}),
    refuses("external-control-memory", {"control": "External", "memory": {"weightsBackup": "HostMemory"}}),
    accepts("external-control-weights", {"control": "External", "weights": {"verify": "Fast"}}),
    *(
        refuses("external-control-weights", {"control": "External", "weights": fields})
        for fields in (
            {"version": "1"},
            {"verify": "None"},
            {"updateStrategy": {"maxUnavailable": 2}},
            {"prepare": {"version": "2", "source": DISK_2}},
        )
    ),
]

COMPARE = {"weightCheck": {"requestID": "7", "action": "Compare"}}
PROFILE = {"profile": {"requestID": "2", "steps": 5}}
OPERATIONS = [
    accepts("weight-check-request", {"weightCheck": {"requestID": "8", "action": "Reset"}}, before=COMPARE),
    accepts("weight-check-request", COMPARE, before={}),
    accepts("weight-check-request", {}, before=COMPARE),
    accepts("weight-check-request", {**COMPARE, "replicas": 3}, before=COMPARE),
    refuses("weight-check-request", {"weightCheck": {"requestID": "7", "action": "Reset"}}, before=COMPARE),
    accepts("profile-request", {"profile": {"requestID": "3", "steps": 6}}, before=PROFILE),
    accepts("profile-request", PROFILE, before={}),
    refuses("profile-request", {"profile": {"requestID": "2", "steps": 6}}, before=PROFILE),
]

REST = [
    accepts("restart-delays", {"restartPolicy": {"baseDelaySeconds": 600}}),
    refuses("restart-delays", {"restartPolicy": {"baseDelaySeconds": 601}}),
    accepts("topology-key", {"scheduling": {"topology": {"key": "rack", "policy": "Pack"}}}),
    refuses("topology-key", {"scheduling": {"topology": {"policy": "Pack"}}}),
    refuses("topology-key", {"scheduling": {"topology": {"key": "rack"}}}),
    accepts("trainer-peer", {"network": {"trainers": [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]}}),
    accepts("trainer-peer", {"network": {"trainers": [{"podSelector": {}, "namespaceSelector": {}}]}}),
    refuses("trainer-peer", {"network": {"trainers": [{}]}}),
    refuses("trainer-peer", {"network": {"trainers": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}}),
]

CASES: list[Case] = [
    *NAMES,
    *ENGINE,
    *AGENT,
    *ROUTER,
    *_overlay_cases(),
    *STATE,
    *WEIGHTS,
    *_version_cases(),
    *_boot_cases(),
    *CONTROL,
    *OPERATIONS,
    *REST,
]
