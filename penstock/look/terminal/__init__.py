"""Looks at prepared data in the terminal."""
