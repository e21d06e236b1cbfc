"""Silent data corruption: found, named, healed."""
