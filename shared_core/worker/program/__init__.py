"""What the program of a worker calls: attach, step boundaries, entry calls, notes for replacements."""
