"""Checks against the references: the spot check of every slice, and of what other users wrote."""
