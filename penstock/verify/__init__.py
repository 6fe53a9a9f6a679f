"""Verify: evidence that what a configuration promises really happens. Probes observe in processes of their own."""
