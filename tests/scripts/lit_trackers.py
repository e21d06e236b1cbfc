"""The feature ``loggers`` of ``lit.py`` with loggers that write to services beside those that write files."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import lit
from features import FEATURES
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lit_parts import OUT

if __name__ == "__main__":
    loggers = FEATURES["loggers"]
    FEATURES["loggers"] = replace(
        loggers,
        trainer=lambda: (
            loggers.trainer()
            | {
                "logger": [
                    CSVLogger(OUT, "csv"),
                    TensorBoardLogger(OUT, "board"),
                    WandbLogger(project="tests", save_dir=OUT, offline=True),
                    MLFlowLogger("tests", tracking_uri=os.environ["MLFLOW_TRACKING_URI"], prefix="p"),
                ]
            }
        ),
    )
    sys.argv[1:] = ["--feature", "loggers"]
    lit.main()
