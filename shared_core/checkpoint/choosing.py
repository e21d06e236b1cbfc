"""Which checkpoint a script that runs without ``swiftrun`` begins with."""

from __future__ import annotations

from shared_core.checkpoint import lineage
from shared_core.checkpoint.command import Command
from shared_core.errors import ConfigError
from shared_core.events import console


def choose(
    where: str, command: Command, world_size: int, *, continues: bool, told: str
) -> tuple[lineage.SavedCheckpoint, bool] | None:
    """The newest whole checkpoint that serves, and whether it is of another command.

    None if there is none; then the user is told what is left behind.

    Args:
        world_size: number of the script's processes; a checkpoint of another number is passed over.
        continues: the script continues from its own checkpoints.
        told: where the checkpoint lies that it was told to begin with; empty for none.

    Raises:
        ConfigError: no checkpoint at ``told`` is whole.
        NoUsableCheckpoint: there are some of its own, and it can use none of them.
    """
    there = lineage.Contents()
    if continues:
        there = lineage.read(where, command.key)
    own = lineage.candidates(there, command.key)
    own = [each for each in own if not told or each.checkpoint.meta.get("adopted") == told]
    adoptable, passed = lineage.to_adopt(told) if told else ([], there.unusable(command.key))
    found = lineage.first_whole(each for each in (*own, *adoptable) if _fits(each, world_size))
    lineage.tell_passed(passed, found)
    if found is not None:
        return found, found not in own
    if told:
        raise ConfigError(f"resume_from: there is no whole checkpoint of {world_size} ranks at {told}")
    if number := len(own) + sum(bool(each.run) for each in passed):
        raise lineage.none_usable(where, number)
    said = lineage.left_behind(where, command.key, "resume_from", continues=continues, again="resume='always'")
    if said:
        console(said)
    return None


def _fits(found: lineage.SavedCheckpoint, world_size: int) -> bool:
    theirs = found.checkpoint.meta.get("world_size")
    if theirs != world_size:
        where = found.checkpoint.path
        console(f"checkpoint {where} is passed over: it is of {theirs} ranks, this job has {world_size}")
    return bool(theirs == world_size)
