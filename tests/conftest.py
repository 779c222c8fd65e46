"""Settings of every test run: no timed tests, since machines differ."""

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")
