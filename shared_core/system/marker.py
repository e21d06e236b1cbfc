"""What tells a folder that this product has made from one that only has such a name.

Before a folder is removed (job folders that killed launchers have left, checkpoints that were never completed) the
marker in it is looked at, which says what the folder is. It keeps folders of the user's that only look like ours, and
ours once they were copied, renamed or kept elsewhere. It proves nothing against somebody who can write into the folder:
the folder's mode and owner keep those out.
"""

from __future__ import annotations

import json

MADE = "made.json"
MOST_BYTES = 4096


def make(folder: str) -> bytes:
    """The marker of a folder; ``folder`` is what no other has, such as its name and inode."""
    return json.dumps({"made by swift-recovery": folder}).encode()


def fits(raw: bytes, folder: str) -> bool:
    return raw == make(folder)
