"""What experiment trackers are told: each row once, in one run, although the process that tells them was replaced.

Only this package imports Weights & Biases and MLflow, and only where the script uses them.
"""

from shared_core.trackers.rows import Mlflow, Rows, Service, note_file, note_runs, of_wandb, prepare, take_up

__all__ = ["Mlflow", "Rows", "Service", "note_file", "note_runs", "of_wandb", "prepare", "take_up"]
