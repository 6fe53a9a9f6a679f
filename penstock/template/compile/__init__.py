"""Chat templates to bytecode for the C machine."""
