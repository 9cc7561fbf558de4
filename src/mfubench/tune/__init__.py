"""`mfubench tune`: the fastest settings for a model on this machine, found by short runs within a budget of minutes.

`search` decides what to try (no runs, no torch), `trials` runs it and keeps every run, `table` shows it.
"""
