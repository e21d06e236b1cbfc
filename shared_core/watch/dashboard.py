"""``swiftrun --dashboard PORT``: the view of the job as a web page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from importlib.resources import files

from shared_core.watch.server import Page
from shared_core.watch.view import JobView


def pages_of(view: Callable[[], JobView]) -> dict[str, Page]:
    """The page, and the data that it asks for again and again. ``view``: gives what there is to see now."""
    html = (files("shared_core.watch") / "page.html").read_bytes()
    policy = (
        f"default-src 'none'; script-src {_hashes(html, b'script')}; style-src {_hashes(html, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "/": Page("text/html; charset=utf-8", lambda: html, {"Content-Security-Policy": policy}),
        "/view.json": Page("application/json", lambda: json.dumps(view().to_dict(), allow_nan=False).encode()),
    }


def _hashes(html: bytes, tag: bytes) -> str:
    """What a browser may run or use of the page: what stands in it, and nothing that was put there."""
    found = re.findall(b"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found)
