"""The index of a view: which window of which row it serves."""
