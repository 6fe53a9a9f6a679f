"""Plans: which rows a step holds, as a function of (lengths, settings, seed, step) alone."""
