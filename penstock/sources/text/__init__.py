"""Text sources: JSON lines and JSON arrays, plain or compressed, cut into slices of rows."""
