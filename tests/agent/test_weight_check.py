"""Answers of SGLang's /weights_checker, word by word as its releases give them, and what is made of them."""

from __future__ import annotations

import json

import pytest

from sglang_rollout.agent.weight_check import judge, sharding
from sglang_rollout.protocol.operations import OperationKind, OperationResult

DIFFERS = (
    "check tensor equality failed:\n"
    "name=model.norm.weight max_abs_err=0.5 mean_abs_err=0.1 num_exceed=3 expect=RawComparable(...) actual=x \n"
    "name=model.embed_tokens.weight max_abs_err=1.0 mean_abs_err=0.2 num_exceed=9 expect=y actual=z "
)
OK = json.dumps({"success": True, "message": "Success."})


def failed(message: str) -> str:
    return json.dumps({"success": False, "message": message})


@pytest.mark.parametrize(
    ("kind", "status", "text", "result", "words"),
    [
        (OperationKind.SNAPSHOT, 200, OK, OperationResult.PASSED, ""),
        (OperationKind.COMPARE, 200, OK, OperationResult.PASSED, ""),
        (OperationKind.COMPARE, 400, failed(DIFFERS), OperationResult.MISMATCH, "2 tensors differ"),
        (
            OperationKind.COMPARE,
            400,
            failed("Torch not compiled with CUDA enabled"),
            OperationResult.UNSUPPORTED,
            "Compare needs a GPU here",
        ),
        (OperationKind.COMPARE, 400, failed(""), OperationResult.ERROR, "take one first"),
        (OperationKind.RESET, 400, failed("Unsupported action='x'"), OperationResult.UNSUPPORTED, "no such check"),
        (OperationKind.CHECKSUM, 404, "Not Found", OperationResult.UNSUPPORTED, "no such check"),
        (OperationKind.CHECKSUM, 200, OK, OperationResult.ERROR, "holds no checksum"),
        (OperationKind.SNAPSHOT, 400, failed("CUDA out of memory"), OperationResult.ERROR, "400: CUDA out of memory"),
        (OperationKind.SNAPSHOT, 500, "Internal Server Error", OperationResult.ERROR, "answered 500"),
    ],
)
def test_judgement(kind: OperationKind, status: int, text: str, result: OperationResult, words: str) -> None:
    report = judge("c", kind, status, text, "7")
    assert (report.id, report.result, report.weight_version) == ("c", result, "7")
    assert words in report.message


def test_the_first_tensors_that_differ_are_named_and_all_are_counted() -> None:
    report = judge("c", OperationKind.COMPARE, 400, failed(DIFFERS), "")
    assert (report.tensors, report.differing) == (["model.embed_tokens.weight", "model.norm.weight"], 2)
    many = "check tensor equality failed:\n" + "\n".join(f"name=w{n:02} max_abs_err=1 " for n in range(30))
    report = judge("c", OperationKind.COMPARE, 400, failed(many), "")
    assert (len(report.tensors), report.differing) == (10, 30)


def placement(role: str, rank: int) -> dict[str, object]:
    return {"role": role, "tp_rank": rank, "tp_size": 2, "dp_rank": 0, "rank": rank, "size": 2}


TARGET = "role=target,tp_rank=0,tp_size=2,dp_rank=0,size=2;role=target,tp_rank=1,tp_size=2,dp_rank=0,size=2"


@pytest.mark.parametrize(
    ("infos", "layout"),
    [
        ([placement("target", 1), placement("target", 0)], TARGET),
        ([[placement("target", 1)], [placement("target", 0)]], TARGET),
        (
            [[placement("target", 0), placement("draft", 0)]],
            "role=draft,tp_rank=0,tp_size=2,dp_rank=0,size=2;role=target,tp_rank=0,tp_size=2,dp_rank=0,size=2",
        ),
    ],
    ids=["0.5.17", "0.5.23", "with a draft model"],
)
def test_a_checksum_comes_with_its_layout(infos: list[object], layout: str) -> None:
    ranks = [{"parallelism_info": info} for info in infos]
    text = json.dumps({"success": True, "message": "", "ranks": ranks, "per_engine_checksum": "ab"})
    report = judge("c", OperationKind.CHECKSUM, 200, text, "7")
    assert (report.checksum, report.sharding) == ("ab", layout)


def test_ranks_without_a_placement_are_counted() -> None:
    assert sharding([{}, None, {"parallelism_info": None}]) == ";;"
