"""Compute-optimal models for a budget (`mfubench plan`): loss laws, search, what a design costs on a machine."""
