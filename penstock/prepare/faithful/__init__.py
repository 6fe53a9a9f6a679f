"""Trains each assistant turn after the prompt that inference shows (`--turns faithful`).

Templates rewrite history; many drop earlier reasoning. A row then becomes several examples, its *chains*, which share
tokens. `sides` makes the chains of ordinary rows, `arrange` those of all rows, `chains` joins them into a batch and
labels what each trains, `seams` checks the tokens between prompts and answers, and `prefixes` reads stored chains.
"""
