"""Rows become conversations, conversations become text with regions."""
