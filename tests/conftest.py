"""Shared by all tests. Its place puts tests/ on the import path, so that `from factories import make_run_log` works."""
