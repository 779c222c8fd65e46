"""SGLang's --custom-weight-loader, called in the scheduler process of every rank. Standard library, torch and our own
modules of which the same is true; never raises, since an exception here ends the engine."""

from __future__ import annotations

import sys
import traceback
from typing import Any


def load(model: Any, named_tensors: Any) -> None:
    """`named_tensors`: one empty tensor whose name is a transfer.hook_call.HookCall. What was done is in the report
    file of this rank (transfer.hook_report); what cannot be reported is printed."""
    try:
        from sglang_rollout.engine.loader.obey import obey

        obey(model, [name for name, _ in named_tensors])
    except Exception:
        print("weight loader: " + traceback.format_exc(), file=sys.stderr, flush=True)
