"""Texts become token ids, and the tokens of each segment are counted."""
