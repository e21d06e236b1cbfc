"""Private names of Lightning's loggers: they learn which run to write to only when they are made, by the script."""

from __future__ import annotations

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger


def take_up_run(logger: Logger, run: str) -> None:
    """Have a logger that has not opened its run yet write to this one."""
    if isinstance(logger, WandbLogger):
        logger._wandb_init.update(id=run, resume="allow")
    elif isinstance(logger, MLFlowLogger) and not logger._initialized:
        logger._run_id = run


def metric_prefix(logger: MLFlowLogger) -> str:
    """What the logger puts before the names of metrics."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
