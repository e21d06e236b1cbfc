"""What ``swiftrun`` serves of a job while it runs: the dashboard, and metrics."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from shared_core.config import SwiftConfig
from shared_core.config.page import help_of
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.watch import metrics
from shared_core.watch.follower import Follower
from shared_core.watch.server import LOOPBACK, DashboardServer, Page
from shared_core.watch.view import JobView

#: The dashboard's curves have a point after so many seconds, also while nobody looks.
_EVERY_S = 5.0


def add_flags(flag: Callable[..., None]) -> None:
    """Add the flags. ``flag``: adds one, given its name and help."""
    flag("dashboard", help_of("watch.dashboard"), metavar="PORT")
    flag("metrics-port", help_of("watch.metrics_port"), metavar="PORT")
    flag("metrics-address", help_of("watch.metrics_address"), metavar="ADDRESS")


class Servers:
    """Takes the ports that the options name, at once; what they serve comes later. ``events``: path of
    ``events.jsonl``, from which most is known. Raises ConfigError where a port is taken or no events are written,
    MissingExtra without ``prometheus_client``.
    """

    def __init__(self, config: SwiftConfig, events: str | None) -> None:
        wanted = config.watch
        self._dashboard: DashboardServer | None = None
        self._metrics: DashboardServer | None = None
        self._closed = threading.Event()
        if wanted.dashboard is None and wanted.metrics_port is None:
            return
        if events is None:
            raise ConfigError("--dashboard and --metrics-port show the job's events: leave --events '' out")
        if wanted.metrics_port is not None:
            metrics.need_prometheus()
            self._metrics = DashboardServer("--metrics-port", wanted.metrics_address, wanted.metrics_port)
        if wanted.dashboard is not None:
            try:
                self._dashboard = DashboardServer("--dashboard", LOOPBACK, wanted.dashboard)
            except ConfigError:
                self.close()
                raise

    def serve(self, job_dir: Path) -> None:
        follower = Follower(job_dir)
        if self._dashboard is not None:
            self._dashboard.serve(dashboard_pages(follower.view))
            looks = threading.Thread(
                target=_keep_looking, args=[follower, self._closed], name="swift-looks", daemon=True
            )
            looks.start()
            console(f"dashboard: http://{LOOPBACK}:{self._dashboard.port}/")
        if self._metrics is not None:
            self._metrics.serve(metrics.pages_of(follower.view))
            console(f"metrics: http://{self._metrics.address}:{self._metrics.port}/metrics")

    def close(self) -> None:
        """Give the ports back."""
        self._closed.set()
        for server in (self._dashboard, self._metrics):
            if server is not None:
                server.close()


def _keep_looking(follower: Follower, closed: threading.Event) -> None:
    """Thread: record the curves from the start of the job, also while nobody has opened the page."""
    while not closed.wait(_EVERY_S):
        with suppress(OSError):
            follower.view()


def dashboard_pages(view: Callable[[], JobView]) -> dict[str, Page]:
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
