"""The verbs of `kubectl sgrollout`, one module for each subject."""

from __future__ import annotations

import click

from ... import __version__
from ..invocation import Surroundings
from .execution import continue_, pause
from .logs import logs
from .memory import release, resume
from .operations import abort, check, flush_cache, profile, restart
from .status import status
from .top import top
from .weights import weights


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kubectl-sgrollout")
@click.pass_context
def sgrollout(ctx: click.Context) -> None:
    """Look at fleets of SGLang engines and steer them.

    A verb changes the SGLangRollout resource, with your own rights, and waits until the operator says that it is
    done. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 timed out, 4 not found, 5 forbidden,
    6 no answer from the API server.
    """
    ctx.obj = ctx.obj or Surroundings()


for _verb in (
    status, pause, continue_, release, resume, weights, check, flush_cache, abort, restart, profile, logs, top,
):  # fmt: skip
    sgrollout.add_command(_verb)
