"""What the program of a worker calls: attach, batch tops, entry calls, notes for replacements."""
