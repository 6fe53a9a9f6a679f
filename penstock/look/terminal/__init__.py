"""Prints progress, summaries, statistics and examples in the terminal."""
