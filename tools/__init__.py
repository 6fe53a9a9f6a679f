"""Tools for contributors: they look for bugs, and are no part of the package."""
