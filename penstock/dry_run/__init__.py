"""Predicts what a build will produce and cost, from a sample of its rows.

`sample` picks rows from all parts of the sources, without reading the rest; `predict` prepares them in a temporary
cache and scales the result up.
"""
