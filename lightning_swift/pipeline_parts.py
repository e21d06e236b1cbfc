"""Parts of the pipeline strategy that need neither a process group nor DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from shared_core.errors import ConfigError, Unsupported

#: Attribute of the LightningModule that holds the layers of this rank's stage.
STAGE = "pipeline_stage"
#: Micro-batches of a step where nobody says how many.
_MICRO_BATCHES = 4
#: What the strategy does itself, and a LightningModule cannot change.
_OWNED = {
    "training_step": "the engine runs the schedule: give the layers in pipeline_layers() and the loss in loss()",
    "validation_step": "the engine evaluates and logs val_loss; define on_pipeline_loss() to log something else",
    "test_step": "the engine evaluates and logs test_loss; define on_pipeline_loss() to log something else",
    "backward": "each micro-batch's backward is an instruction of the engine's schedule",
    "optimizer_step": "the step is an instruction of the engine's schedule; on_before_optimizer_step() is called",
    "configure_gradient_clipping": "the engine clips, by one norm for all stages: use Trainer(gradient_clip_val=...)",
}
_TRAINER_FILE = "trainer.ckpt"
_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"


def check_module(module: pl.LightningModule) -> None:
    """Raise ConfigError for a module that is no list of layers, or wants to do what the engine does."""
    name = type(module).__name__
    for method, reason in _OWNED.items():
        if getattr(type(module), method) is not getattr(pl.LightningModule, method):
            raise ConfigError(f"{name} overrides {method}(), which a pipeline does not call: {reason}")
    for method, what in (("pipeline_layers", "the list of its layers"), ("loss", "the loss of (outputs, targets)")):
        if not callable(getattr(module, method, None)):
            raise ConfigError(f"{name} has no {method}(), which returns {what}: a pipeline needs it")
    if not module.automatic_optimization:
        raise ConfigError(f"{name} sets automatic_optimization=False: the engine steps the optimizer itself")


def micro_batches_of(given: int | None, config: Mapping[str, Any], accumulate: int) -> tuple[int, int]:
    """(micro-batches that one batch of the loader is split into, loader's batches of one optimizer step).

    ``accumulate`` is ``Trainer(accumulate_grad_batches=...)``, 1 if not given. Raises ConfigError for a contradiction.
    """
    steps = config.get("gradient_accumulation_steps")
    if given is not None and steps not in (None, "auto", given):
        raise ConfigError(
            f"micro_batches={given}, but the DeepSpeed configuration has gradient_accumulation_steps={steps}: they are "
            "the same thing, leave one out"
        )
    number = given if given is not None else steps if isinstance(steps, int) else None
    if accumulate > 1:
        if number is not None:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={accumulate}) makes each batch of the loader one micro-batch, and "
                f"{number} micro-batches per batch were given as well: leave one out"
            )
        return 1, accumulate
    number = _MICRO_BATCHES if number is None else number
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"micro_batches must be a whole number of at least 1, got {number!r}")
    return number, 1


def engine_config(
    config: Mapping[str, Any], micro_batches: int, clip: float | None, algorithm: str | None
) -> dict[str, Any]:
    """DeepSpeed's configuration, from the user's and the Trainer's clipping; ``micro_batches`` of a step.

    Raises ConfigError for what Lightning does and for a contradiction, Unsupported for clipping by value.
    """
    for section, instead in (("optimizer", "the optimizer"), ("scheduler", "the scheduler, which Lightning steps,")):
        if section in config:
            raise ConfigError(
                f"the DeepSpeed configuration has a section {section!r}, but {instead} comes from "
                "configure_optimizers(): remove the section"
            )
    if clip and algorithm is not None and str(getattr(algorithm, "value", algorithm)) != "norm":
        raise Unsupported(
            "gradient_clip_algorithm='value': DeepSpeed's engine clips by the norm only. Leave "
            "gradient_clip_algorithm out"
        )
    limit = config.get("gradient_clipping")
    if clip is not None and limit not in (None, "auto", clip):
        raise ConfigError(
            f"Trainer(gradient_clip_val={clip}), but the DeepSpeed configuration has gradient_clipping={limit}: leave "
            "one out"
        )
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # as with Lightning's own strategy
        **config,
    }
    made["gradient_accumulation_steps"] = micro_batches
    if clip is not None:
        made["gradient_clipping"] = clip
    return made


def precision_config(config: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """DeepSpeed's configuration with the Trainer's precision in it, as Lightning spells it out.

    Raises ConfigError for a contradiction, Unsupported for all but fp32, bf16 and ZeRO stages 0 and 1.
    """
    if precision not in ("32-true", "bf16-true", "bf16-mixed") or _enabled(config, "fp16"):
        asked = "a section 'fp16' in the DeepSpeed configuration" if _enabled(config, "fp16") else repr(precision)
        raise Unsupported(
            f"precision: a pipeline trains in 32-bit or bf16, got {asked}: fp16 has a loss scale that cannot be "
            "recovered in this version. Use precision='bf16-true', or leave precision out"
        )
    stage = dict(config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1):
        raise Unsupported(f"zero_optimization has stage {stage}: a pipeline can use stage 1, or leave the section out")
    wanted, said = precision != "32-true", _enabled(config, "bf16")
    if said not in (None, wanted):
        raise ConfigError(
            f"Trainer(precision={precision!r}), but the DeepSpeed configuration has bf16 {'on' if said else 'off'}: "
            "leave the section 'bf16' out, and say precision='bf16-true' for bf16"
        )
    made = dict(config)
    if wanted:
        made["bf16"] = {**dict(config.get("bf16") or {}), "enabled": True}
    return made


def _enabled(config: Mapping[str, Any], section: str) -> bool | None:
    """Whether a section is switched on; None if nothing is said."""
    said = dict(config.get(section) or {}).get("enabled", "auto")
    return None if said == "auto" else bool(said)


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration as plain data, also from a JSON file; ConfigError where that cannot be read."""
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    try:
        found = json.loads(Path(config).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the DeepSpeed configuration {config}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"the DeepSpeed configuration {config} must hold options, not {type(found).__name__}")
    return found


# -- batches ----------------------------------------------------------------------------------------------------------


def rows_of(batch: Any) -> int:
    """First dimension of all tensors of a batch. ConfigError if it is no pair, or the tensors differ in it."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, not a pair (inputs, targets): a pipeline's first stage reads the "
            "inputs and its last one the targets. Return pairs from the data set, or make them in collate_fn"
        )
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        raise ConfigError("inputs and targets must be tensors (or tuples of tensors) with a dimension for the rows")
    rows = {len(leaf) for leaf in leaves}
    if len(rows) != 1:
        raise ConfigError(f"the tensors of a batch have different numbers of rows: {sorted(rows)}")
    return rows.pop()


def split(batch: Any, pieces: int) -> list[tuple[Any, Any]]:
    """Split a batch along the first dimension, into views. ConfigError if that leaves a rest."""
    rows = rows_of(batch)
    if not rows or rows % pieces:
        raise ConfigError(_uneven(rows, pieces))
    size = rows // pieces

    def piece(number: int) -> tuple[Any, Any]:
        inputs, targets = (
            tree_map(lambda leaf: leaf[number * size : (number + 1) * size], part) for part in (batch[0], batch[1])
        )
        return inputs, targets

    return [piece(number) for number in range(pieces)]


def most_pieces(rows: int, limit: int) -> int:
    """The largest number of equal pieces, at most ``limit``, of a batch that is evaluated."""
    return max(number for number in range(1, limit + 1) if rows % number == 0)


def shapes_of(piece: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in tree_leaves(piece)]


def check_loader(loader: object, pieces: int) -> None:
    """Raise ConfigError for a training loader that shows before training that a batch cannot be split."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not hasattr(sampler, "__len__"):
        return
    samples = len(loader.sampler)  # type: ignore[arg-type]
    for rows in [loader.batch_size] * (samples >= loader.batch_size) + [samples % loader.batch_size] * (
        not loader.drop_last
    ):
        if rows % pieces:
            raise ConfigError(_uneven(rows, pieces))


def _uneven(rows: int, pieces: int) -> str:
    return (
        f"a batch of {rows} rows cannot be split into {pieces} micro-batches: choose a batch size that is a multiple "
        "of micro_batches, and DataLoader(drop_last=True) where the last batch of an epoch is smaller"
    )


# -- checkpoints ------------------------------------------------------------------------------------------------------


class StageFiles:
    """A checkpoint: a folder with one file a stage, and one with what all ranks share, written last.

    Where the optimizer of a stage is divided over its ranks, each of these has a file, too. The shared file names the
    others. Files of an older checkpoint in the same folder stay until the new one is complete.

    Args:
        folder: path or URL.
        io: writes and reads files.
        index: data-parallel index of this rank.
        shards: ranks that the optimizer of a stage is divided over; 0: each of them has it all.
    """

    def __init__(self, folder: str, io: CheckpointIO, stage: int, stages: int, index: int = 0, shards: int = 0) -> None:
        self._folder, self._io, self._stage, self._stages = folder.rstrip("/"), io, stage, stages
        self._index, self._shards = index, shards

    def _parts(self, step: int) -> dict[str, tuple[str, ...]]:
        """Files of this rank's stage and what is in them; its own shard only."""
        stage, rest = f"stage{self._stage}-of-{self._stages}", f"step{step}.ckpt"
        if not self._shards:
            return {f"{stage}-{rest}": (_STATE, _OPTIMIZERS)}
        shard = f"{stage}-shard{self._index}-of-{self._shards}-{rest}"
        return {f"{stage}-{rest}": (_STATE,), shard: (_OPTIMIZERS,)}

    def write_parts(self, checkpoint: Mapping[str, Any], options: Any) -> None:
        """Write what this rank alone has, and, by the stage's first rank, what the stage alone has."""
        for file, names in self._parts(checkpoint["global_step"]).items():
            part = {name: checkpoint[name] for name in names if name in checkpoint}
            if part and (self._index == 0 or _STATE not in names):
                self._io.save_checkpoint(part, f"{self._folder}/{file}", options)

    def commit(self, checkpoint: Mapping[str, Any], options: Any) -> None:
        """Write what all ranks share; call it on one rank, once all parts are there."""
        shared = {name: value for name, value in checkpoint.items() if name not in (_STATE, _OPTIMIZERS)}
        shared |= {"pipeline_stages": self._stages, "pipeline_shards": self._shards if _OPTIMIZERS in checkpoint else 0}
        self._io.save_checkpoint(shared, f"{self._folder}/{_TRAINER_FILE}", options)

    def drop_older(self, step: int) -> None:
        """Remove parts of this stage that the shared file does not name any more; done by the stage's first rank."""
        if self._index:
            return
        fs = get_filesystem(self._folder)
        for path in fs.glob(f"{self._folder}/stage{self._stage}-of-*.ckpt"):
            if not path.endswith(f"-step{step}.ckpt"):
                fs.rm(path)

    def read(self, weights_only: bool | None) -> dict[str, Any]:
        """The checkpoint of this stage, as Lightning knows it. ConfigError if it is incomplete, or of other stages."""
        fs = get_filesystem(self._folder)
        if not fs.exists(f"{self._folder}/{_TRAINER_FILE}"):
            raise ConfigError(
                f"{self._folder} is not a complete checkpoint of a pipeline: it has no {_TRAINER_FILE}, which is "
                "written last. Choose another one"
            )
        shared = self._io.load_checkpoint(f"{self._folder}/{_TRAINER_FILE}", weights_only=weights_only)
        stages = shared.pop("pipeline_stages", None)
        if stages != self._stages:
            raise ConfigError(
                f"{self._folder} is the checkpoint of a pipeline of {stages} stages, and this one has {self._stages}: "
                "use as many"
            )
        shards = shared.pop("pipeline_shards", 0)
        parts = self._parts(shared["global_step"])
        if self._shards and shards != self._shards:
            if shards:
                raise ConfigError(
                    f"{self._folder} has the optimizer of each stage in {shards} parts, one for each of its ranks, and "
                    f"now there are {self._shards}: use as many pipelines"
                )
            parts.pop(next(file for file, names in parts.items() if _OPTIMIZERS in names))
        for part in parts:
            shared |= self._io.load_checkpoint(f"{self._folder}/{part}", weights_only=weights_only)
        return shared
