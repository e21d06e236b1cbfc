"""``swiftctl checkpoints``: what lies in a folder of checkpoints, and from which of them a job would go on."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from shared_core.checkpoint import store
from shared_core.checkpoint.storage import Storage, open_storage
from shared_core.errors import SwiftError
from shared_core.report.text import columns, in_bytes


def add_command(commands: Any) -> None:
    """Add it to the subcommands of ``swiftctl``."""
    parser = commands.add_parser(
        "checkpoints",
        help="list and verify the checkpoints of a job, and say which one a restart would take",
        description="Print one row for each checkpoint. The exit status is 1 if none can be restarted from.",
    )
    parser.add_argument("dir", metavar="DIR", help="checkpoint_dir of the job: a folder or a URL")
    parser.add_argument("--world-size", type=int, metavar="N", help="only those of a job of N workers")
    parser.add_argument("--fast", action="store_true", help="do not read the parts to compare their checksums")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        storage = open_storage(options.dir)
        found = store.survey(storage, check=not options.fast)
    except (OSError, SwiftError) as error:
        print(f"swiftctl: cannot read {options.dir}: {error}", file=sys.stderr)
        return 2
    picked = next((one for one in reversed(found) if _serves(one, options.world_size)), None)
    if options.json:
        print(
            json.dumps({"pick": picked.step if picked else None, "found": [_to_dict(one) for one in found]}, indent=2)
        )
    else:
        _print(storage, found, picked, options.fast)
    return 0 if picked is not None else 1


def _serves(one: store.Found, world_size: int | None) -> bool:
    if one.checkpoint is None or one.state not in ("valid", "unchecked"):
        return False
    return world_size is None or one.checkpoint.meta.get("world_size") == world_size


def _print(storage: Storage, found: list[store.Found], picked: store.Found | None, fast: bool) -> None:
    rows = []
    for one in found:
        meta = one.checkpoint.meta if one.checkpoint is not None else {}
        words = [meta.get(key, "") for key in ("world_size", "version", "attempt")]
        mark = "*" if one is picked else ""
        parts = len(one.checkpoint.parts) if one.checkpoint is not None else ""
        cells = [mark, one.step, one.state, *words, parts, in_bytes(one.bytes), one.reason]
        rows.append([str(cell) for cell in cells])
    if rows:
        print(columns([["", "step", "state", "workers", "version", "attempt", "parts", "size", "why"], *rows]))
    else:
        print(f"nothing in {storage.root}")
    if picked is not None:
        unsure = ", if its parts are whole (they were not read)" if fast else ""
        print(f"\na restart goes on from step {picked.step}{unsure}", flush=True)
    else:
        print("\na restart begins anew: there is no checkpoint that it could take", flush=True)


def _to_dict(one: store.Found) -> dict[str, Any]:
    checkpoint = one.checkpoint
    return {
        "step": one.step,
        "state": one.state,
        "reason": one.reason,
        "bytes": one.bytes,
        "meta": dict(checkpoint.meta) if checkpoint is not None else None,
        "parts": dict(checkpoint.parts) if checkpoint is not None else None,
    }
