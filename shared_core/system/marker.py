"""What tells a folder that this product has made from one that only has such a name.

Before a folder is removed (job folders that killed launchers have left, checkpoints that were never completed) the
marker in it is looked at: a random key of its own, and a MAC by that key of what the folder is. It keeps folders of the
user's that only look like ours, and ours once they were copied, renamed or kept elsewhere. It proves nothing against
somebody who can write into the folder: the folder's mode and owner keep those out.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets

from shared_core.plain_json import parse

MADE = "made.json"
MOST_BYTES = 4096


def make(folder: str) -> bytes:
    """The marker of a folder; ``folder`` is what no other has, such as its name and inode."""
    key = secrets.token_hex(16)
    return json.dumps({"key": key, "mac": _mac(key, folder)}).encode()


def fits(raw: bytes, folder: str) -> bool:
    """Whether these bytes are the marker of a folder; False for whatever else they are."""
    try:
        found = parse(raw)
        return hmac.compare_digest(_mac(str(found["key"]), folder), str(found["mac"]))
    except (ValueError, KeyError, TypeError):
        return False


def _mac(key: str, folder: str) -> str:
    return hmac.digest(key.encode(), b"made by swift-recovery: " + os.fsencode(folder), "sha256").hex()
