"""The training process: its groups, logs, state, checkpoints and recoveries."""
