"""What those who watch a job find in its private folder: which job it is, and where its events are."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from shared_core.plain_json import is_count, parse
from shared_core.system.jobdir import CARD, LOCK, PREFIX, places


@dataclass(frozen=True)
class Card:
    """One job on this machine.

    Attributes:
        name: of the job, as ``--rdzv-id`` gives it.
        begun: ``time.time()`` of its start.
        events: path of ``events.jsonl``; empty if there is none.
        events_from: size of that file before the job's first event, in bytes.
    """

    run: str = ""
    name: str = ""
    script: str = ""
    host: str = ""
    agent: int = 0
    begun: float = 0.0
    events: str = ""
    events_from: int = 0

    def write(self, job_dir: Path) -> None:
        """Leave it in the job's folder, atomically; an OSError is ignored, as no job depends on it."""
        with suppress(OSError):
            fresh = job_dir / f"{CARD}.new"
            fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")
            os.replace(fresh, job_dir / CARD)

    @classmethod
    def read(cls, job_dir: Path) -> Card | None:
        """The card in a job's folder; None if there is none, or it is damaged."""
        try:
            found = parse((job_dir / CARD).read_bytes())
            card = cls(**{each.name: found[each.name] for each in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None
        words = (card.run, card.name, card.script, card.host, card.events)
        good = all(isinstance(word, str) for word in words) and is_count(card.agent) and is_count(card.events_from)
        return card if good and type(card.begun) is float and abs(card.begun) < 1e11 else None


def jobs_here() -> Iterator[tuple[Path, Card]]:
    """Folders and cards of the jobs of this user that run on this machine."""
    for parent in places():
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            with suppress(OSError):
                if os.lstat(folder).st_uid != os.geteuid():
                    continue
                card = Card.read(folder)
                if card is not None and is_held(folder):
                    yield folder, card


def is_held(job_dir: Path) -> bool:
    """Whether the launcher of the job lives: it holds a lock in the folder."""
    try:
        fd = os.open(job_dir / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
