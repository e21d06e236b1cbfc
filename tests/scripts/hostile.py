"""``plain_ddp.py``, and rank 0 writes the records of ``HOSTILE`` into the job's store at its third batch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shared_core.protocol import worker_env
from shared_core.protocol.worker_messages import WORDS
from shared_core.worker import link
from tests.support.report import Report

sys.path.insert(0, str(Path(__file__).parent))

import plain_ddp  # noqa: E402

count = Report.count


def count_and_write(self: Report, key: str) -> None:
    count(self, key)
    here = worker_env.env()
    if key != "batch 2" or here.rank or here.incarnation:
        return
    store = link.connect_store()
    for name, value in json.loads(os.environ["HOSTILE"]).items():
        if name.startswith("queue:"):
            store.queue_push(here.prefix + name.removeprefix("queue:"), value)
            store.queue_push(f"{here.prefix}{WORDS}/0", "x")
            continue
        for each in [name.replace("*", f"{version}/1") for version in range(12)] if "*" in name else [name]:
            store.set(here.prefix + each, value)
    store.check(["x"])  # a set is not acknowledged; this is, after it


if __name__ == "__main__":
    Report.count = count_and_write  # type: ignore[method-assign]
    plain_ddp.main()
