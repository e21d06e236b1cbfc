"""The demo: one training script, run without and with failures, and the two compared bit by bit."""
