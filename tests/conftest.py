"""Shared by all tests. Its place puts tests/ on the import path, so that `from factories import make_run_log` works."""

import os

from hypothesis import settings

# The same examples each time: a test that passed here passes elsewhere. HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
