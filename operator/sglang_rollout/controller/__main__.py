"""python -m sglang_rollout.controller: the operator."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

from .kube import load_configuration
from .process import OperatorProcess
from .settings import Settings, SettingsError, from_environment

# Objects more than before, at which Python looks for cycles. A plan of a large fleet makes tens of thousands that live
# as long as it does: with Python's own 700 a quarter of the time goes into looking through them again and again.
COLLECT_AFTER = (50_000, 20, 20)


async def run(settings: Settings) -> int:
    return await OperatorProcess(settings, await load_configuration()).run()


def main() -> int:
    try:
        settings = from_environment()
    except SettingsError as error:
        print(f"sglang-rollout: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    gc.set_threshold(*COLLECT_AFTER)
    gc.freeze()  # what was imported stays
    return asyncio.run(run(settings))


if __name__ == "__main__":
    sys.exit(main())
