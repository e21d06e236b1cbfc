"""Checkpoints that the training process makes, and the one from which it continues."""
