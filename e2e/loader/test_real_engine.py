"""The weight loader in real SGLang on CPU: versions there and back, and bad ones refused while the old one serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.sglang_cpu import environment, models
from e2e.sglang_cpu.engine import RunningEngine, engine_command
from sglang_rollout.transfer.digests import BLAKE2B
from sglang_rollout.transfer.disk_reader import Reading, stage_checkpoint
from sglang_rollout.transfer.hook_call import LOADER, Action, HookCall, request_body
from sglang_rollout.transfer.hook_report import HookReport, read_reports
from sglang_rollout.transfer.manifest import Manifest, Tensor, bucket_of
from sglang_rollout.transfer.stage import Stage, reserve_host
from sglang_rollout.transfer.stage_index import ENV_FOLDER
from tests.free_ports import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SLOT = 32 << 20
CALL_SECONDS = 60


class Pod:
    """An engine with the loader, and its stage as an agent would keep it."""

    def __init__(self, folder: Path, model: str, *, tp: int = 1) -> None:
        self.tp = tp
        self.stage_folder = folder / "stage"
        self.stage: Stage = reserve_host(self.stage_folder, SLOT, 2)
        packages = folder / "packages"
        packages.mkdir()
        (packages / "sglang_rollout").symlink_to(ROOT / "operator" / "sglang_rollout")
        port = free_port()
        argv, env = engine_command(
            models.path(model), port, tp=tp, weight_version="v1", extra=["--custom-weight-loader", LOADER]
        )
        env |= {"PYTHONPATH": str(packages), ENV_FOLDER: str(self.stage_folder)}
        self.engine = RunningEngine(argv, env, port, folder / "engine.log")
        self._transactions = 0

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.engine.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            text = answer.read()
        try:
            return json.loads(text)
        except ValueError:
            return text.decode()

    def hook(self, action: Action, root: str = "", *, session: bool = True) -> list[HookReport]:
        self._transactions += 1
        call = HookCall(action, f"t{self._transactions}", "v", root)
        if session:
            self.post("/begin_weight_update", {"selector": "all"})
        answer = self.post("/update_weights_from_tensor", request_body(call, self.tp))
        if session:
            self.post("/end_weight_update")
        assert answer["success"]
        reports = read_reports(self.stage_folder, call.transaction, str(action))
        assert [report.rank for report in reports] == list(range(self.tp))
        return reports

    def commit(self, manifest: Manifest, version: str) -> list[HookReport]:
        """As the agent does: check and apply in one session, inside one pause."""
        self.post("/pause_generation", {"mode": "retract"})
        self.post("/flush_cache")
        self.post("/begin_weight_update", {"selector": "all"})
        reports = self.hook(Action.CHECK, manifest.root, session=False)
        assert all(report.good for report in reports), reports
        reports = self.hook(Action.APPLY, manifest.root, session=False)
        assert all(report.good for report in reports), reports
        self.post("/end_weight_update")
        self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self.post("/continue_generation")
        return reports

    def checksum(self) -> str:
        return str(self.post("/weights_checker", {"action": "checksum"})["per_engine_checksum"])

    def tokens(self) -> tuple[list[int], str]:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
        answer = self.post("/generate", body)
        return answer["output_ids"], answer["meta_info"]["weight_version"]

    def read(self, model: str, version: str) -> Manifest:
        slot = self.stage.free_slot("").name
        return stage_checkpoint(self.stage, slot, Reading(models.path(model), version, BLAKE2B, bucket_bytes=100_000))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    folder = Path("/dev/shm") / f"loader-test-{os.getpid()}-{request.param}"
    folder.mkdir()
    try:
        pod = Pod(folder, "qwen3-v1", tp=request.param)
        with pod.engine:
            pod.engine.wait_healthy()
            yield pod
    finally:
        shutil.rmtree(folder)


def test_versions_there_and_back(pod: Pod) -> None:
    first = pod.checksum()
    one, two = pod.read("qwen3-v1", "v1"), pod.read("qwen3-v2", "v2")
    for report in pod.hook(Action.REGISTER):
        assert report.good, report.problem
        assert report.layouts == (one.layout,)
        assert "ready" in report.seconds  # its loading is nothing but copies
    before, _ = pod.tokens()
    reports = pod.commit(two, "v2")
    assert [report.compared == "equal" for report in reports] == [pod.tp == 1] * pod.tp
    assert pod.tokens()[1] == "v2"
    assert pod.tokens()[0] != before
    second = pod.checksum()
    assert second != first
    pod.commit(one, "v1")
    assert pod.checksum() == first
    assert pod.tokens() == (before, "v1")


def test_a_sharded_checkpoint_is_the_same_weights(pod: Pod) -> None:
    pod.commit(pod.read("qwen3-v2", "v2"), "v2")
    whole = pod.checksum()
    pod.commit(pod.read("qwen3-v1", "v1"), "v1")
    pod.commit(pod.read("qwen3-sharded-v2", "v2"), "v2")
    assert pod.checksum() == whole


@pytest.mark.parametrize("fault", ["digest", "missing", "shape"])
def test_bad_weights_are_refused_and_the_old_serve(pod: Pod, fault: str) -> None:
    before, checksum = pod.tokens(), pod.checksum()
    if fault == "digest":
        root, sentence = "0" * 64, "are not staged here"
    else:
        root, sentence = _damaged(pod, fault)
    for action in (Action.CHECK, Action.APPLY):
        for report in pod.hook(action, root):
            assert sentence in report.problem
            assert not report.written
    assert pod.tokens() == before
    assert pod.checksum() == checksum


def _damaged(pod: Pod, fault: str) -> tuple[str, str]:
    """A stage that lacks a tensor, or has one of another shape, which an agent would not have let in."""
    good = pod.read("qwen3-v2", "v2")
    name = next(name for name in good.tensors if name.endswith("k_proj.weight"))
    tensors = dict(good.tensors)
    if fault == "missing":
        del tensors[name]
        sentence = "parts of the model would keep their old bytes: model.layers.0.self_attn.qkv_proj.weight"
    else:
        rows, columns = tensors[name].shape
        tensors[name] = Tensor(name, tensors[name].dtype, (rows, columns // 2))
        sentence = f"cannot load tensor {name}"
    writer = pod.stage.write(pod.stage.free_slot(good.root).name, BLAKE2B)
    with writer.fill(writer.place(bucket_of(list(tensors.values())))) as view:
        view[:] = bytes(len(view))
    return writer.seal("bad").root, sentence


def test_a_stranger_s_payload_changes_nothing(pod: Pod) -> None:
    checksum = pod.checksum()
    body = request_body(HookCall(Action.APPLY, "t"), pod.tp)
    pod.post("/begin_weight_update", {"selector": "all"})
    pod.post("/update_weights_from_tensor", body)
    pod.post("/end_weight_update")
    assert pod.checksum() == checksum
    with pytest.raises(urllib.error.HTTPError):
        pod.post("/update_weights_from_tensor", body)  # outside a session


def test_small_models_in_the_engine_s_environment() -> None:
    """tests/loader needs torch, which is there."""
    paths = [str(ROOT / "operator"), str(ROOT), str(Path(pytest.__file__).parents[1])]
    run = subprocess.run(
        [str(environment.interpreter()), "-m", "pytest", "-p", "no:cacheprovider", "tests/loader"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
