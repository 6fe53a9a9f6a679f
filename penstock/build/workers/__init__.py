"""Who makes which slice: worker processes, claims, ranks."""
