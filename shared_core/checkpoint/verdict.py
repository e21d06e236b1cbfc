"""The last line of a job that was told to end: is its last checkpoint committed, and what does its next start do?"""

from __future__ import annotations

import threading
from typing import Any

from shared_core.checkpoint import lineage
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.spool import Spool
from shared_core.errors import SwiftError

#: Longest wait for the storage's answer, in seconds: the job is being ended.
READ_S = 1.0


def verdict(where: str, command: Command, spool: Spool, reached: int, *, continues: bool) -> str:
    """The line, from what the storage holds now. Call it when nobody writes any more.

    Args:
        reached: step boundaries that the job has passed; 0 if none since it was started.
        continues: the job began with what an earlier start of its command had left.
    """
    found = _read(where, command.key)
    status = spool.status().committed
    if found is None:
        committed = int(status.get("step", -1))
        return sentence(reached, committed, f"'swiftctl checkpoints {where}' says what the next start does")
    following = lineage.next_start(found, command)
    run = str(status.get("run") or _run_in(spool))
    if run:
        committed = max((each.step for each in found.saved if each.run == run), default=-1)
    else:
        committed = following.saved.step if continues and following.saved is not None else -1
    return sentence(reached, committed, str(following), ended=run in found.ended_of(command.key))


def sentence(reached: int, committed: int, following: str, *, ended: bool = False) -> str:
    """As :func:`verdict`.

    Args:
        committed: step boundary of the newest checkpoint of this run in storage; -1 for none.
        following: what the next start does.
        ended: the run has ended well.
    """
    if ended:
        return f"nothing had to be written: the run has ended; {following}"
    if not reached:
        return f"nothing had to be written: no batch was begun since the start; {following}"
    if committed >= reached:
        return f"the last checkpoint is committed, at step boundary {committed}: nothing is lost; {following}"
    return f"the last checkpoint, at step boundary {reached}, was not written in time; {following}"


def _run_in(spool: Spool) -> str:
    for each in spool.all_attempts():
        for step in reversed(each.steps()):
            for part in each.parts(step).values():
                return str(part.meta.get("run", ""))
    return ""


def _read(where: str, key: str) -> lineage.Contents | None:
    """What the storage holds of a command; None if it does not answer within ``READ_S``."""
    answer: list[Any] = []

    def read() -> None:
        try:
            answer.append(lineage.contents(where, key))
        except (OSError, SwiftError):
            pass

    thread = threading.Thread(target=read, name="swift-verdict", daemon=True)
    thread.start()
    thread.join(READ_S)
    return answer[0] if answer else None
