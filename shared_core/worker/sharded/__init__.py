"""Parameters and optimizer state that are divided over the ranks (FSDP2, HSDP): each rank publishes its own shard."""
