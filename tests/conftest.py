"""Settings of every test run: no timed tests, since machines differ; in CI the same examples at every run, so that
what it says depends on the change alone. New ones are looked for everywhere else."""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("default")
