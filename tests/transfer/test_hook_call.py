"""Calls and reports between agent and engine come over whole, and the payload is a pickle of one named tensor."""

from __future__ import annotations

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_rollout.transfer.hook_call import LOADER, Action, CallRefused, HookCall, request_body
from sglang_rollout.transfer.hook_report import HookReport, read_reports, write_report

CALLS = st.builds(HookCall, st.sampled_from(Action), st.text(), st.text(), st.text(), st.text(), st.booleans())


class OneClass(pickle.Unpickler):
    """As SGLang's, which allows the classes of torch tensors."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "ByteTensor")
        return list


@given(CALLS, st.integers(1, 8))
def test_a_call_comes_over(call: HookCall, ranks: int) -> None:
    body = request_body(call, ranks)
    assert body["load_format"] == LOADER
    assert len(body["serialized_named_tensors"]) == ranks
    for entry in body["serialized_named_tensors"]:
        ((name, tensor),) = OneClass(io.BytesIO(base64.b64decode(entry))).load()
        assert tensor == []
        assert HookCall.from_name(name) == call


@pytest.mark.parametrize("name", ["", "model.embed_tokens.weight", "sglang-rollout:1:{}", "sglang-rollout:1:[]"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CallRefused):
        HookCall.from_name(name)


def test_reports_are_found_by_transaction_and_action(tmp_path: Path) -> None:
    reports = [
        HookReport("t1", "check", rank, 2, "Qwen3ForCausalLM", 1, notes=("a",), seconds={"copy": 0.5})
        for rank in (1, 0)
    ]
    for report in reports:
        write_report(tmp_path, report)
    (tmp_path / "reports" / "9-Other.json").write_text("{")
    assert read_reports(tmp_path, "t1", "check") == sorted(reports, key=lambda report: report.rank)
    assert read_reports(tmp_path, "t1", "apply") == read_reports(tmp_path, "t2", "check") == []
