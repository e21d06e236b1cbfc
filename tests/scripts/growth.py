"""``loop.py``, and rank 0 notes at each batch what the job takes: shared memory, and of the launcher and of itself
descriptors, threads and memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shared_core.events import read_events
from shared_core.protocol import worker_env
from tests.support.report import OUT, Report

sys.path.insert(0, str(Path(__file__).parent))

import loop  # noqa: E402

count = Report.count


def process(pid: int, name: str) -> dict[str, int]:
    here = Path(f"/proc/{pid}")
    memory = next(line.split()[1] for line in (here / "status").read_text().splitlines() if line.startswith("VmRSS"))
    parts = {"descriptors": len(os.listdir(here / "fd")), "threads": len(os.listdir(here / "task"))}
    return {f"{name}'s {key}": value for key, value in {**parts, "memory": int(memory)}.items()}


def count_and_note(self: Report, key: str) -> None:
    count(self, key)
    if os.environ.get("SWIFT_BASELINE") or self.who["rank"]:
        return
    here = worker_env.env()
    files = [path.stat() for path in here.job_dir.rglob("*") if path.is_file()]
    agent = next(int(event.fields["agent"]) for event in read_events(str(here.events)) if event.kind == "start")
    note = {"files": len(files), "bytes": sum(each.st_blocks * 512 for each in files)}
    note |= process(agent, "launcher") | process(os.getpid(), "survivor")
    with (Path(os.environ[OUT]) / "notes.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    Report.count = count_and_note  # type: ignore[method-assign]
    group = loop.train()  # let go of after the model
