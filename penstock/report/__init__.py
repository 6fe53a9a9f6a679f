"""Looks at prepared data in the terminal: one example token by token, and statistics of all."""
