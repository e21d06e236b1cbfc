"""The beginning of scripts that tests of ``swiftrun`` run."""

from __future__ import annotations

import json

from util import Job

#: Ranks meet at keys of the store, so that a script knows when the others have come to a place.
PRELUDE = """
import json, os, signal, sys, time
from shared_core.worker import link
from shared_core.protocol import progress_file
from shared_core.protocol import worker_env
from shared_core.protocol.generation import Entry
me = worker_env.env()
store = link.connect_store()
def reach(name, rank=None):
    store.set(f"test/{name}/{me.rank if rank is None else rank}", str(os.getpid()))
def await_(name, rank):
    store.wait([f"test/{name}/{rank}"], 40)
    return int(store.get(f"test/{name}/{rank}"))
def generation(g):
    store.wait([me.prefix + f"gen/{g}"], 40)
    entry = Entry.from_json(store.get(me.prefix + f"gen/{g}"), g, me.world_size)
    return {"generation": entry.generation, **entry.event_fields()}
def show(**fields):
    os.write(1, (json.dumps(fields) + "\\n").encode())  # whole: others write to the same pipe
"""


def shown(job: Job) -> list[dict]:
    """What the script printed with ``show``."""
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
