"""Trains each assistant turn after the prompt that inference shows (`--turns faithful`).

Templates rewrite history: they drop earlier reasoning, for example. A row then has several examples, its *chains*,
which share tokens. `chains` decides which turns a chain trains, `arrange` lays out the chains of a row so that shared
prefixes are stored once, `seams` checks that tokens at their borders are those of the whole text, and `prefixes` reads
stored chains back.
"""
