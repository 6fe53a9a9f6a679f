"""Batches: collated, ahead of the step, resumable; the exits to torch and its trainers."""
