"""Random scripts, run once stock and once with a failure: the same at the end, or refused by name."""
