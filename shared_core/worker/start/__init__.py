"""How a process becomes a worker: the zygote, what it imports, the user's program."""
