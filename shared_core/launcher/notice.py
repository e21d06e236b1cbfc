"""What tells that this machine will be taken away: a signal, a file or a command, as the option ``notice`` names it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable

from shared_core.errors import ConfigError
from shared_core.launcher.wakeup import Wakeup

#: Start of an option that is a command, and seconds between two runs of it.
RUN, EVERY_S = "run:", 5.0


class Notice:
    """Comes at most once. Raises ConfigError for a signal that there is not."""

    def __init__(self, told: str | None, wakeup: Wakeup) -> None:
        self._told, self._wakeup = told or "", wakeup
        self._over, self._noticed = threading.Event(), threading.Event()
        self._come = False
        if self._told.startswith("SIG"):
            if self._told not in signal.Signals.__members__:
                raise ConfigError(f"notice: {self._told} is no signal")
            wakeup.set_apart(signal.Signals[self._told])
        elif self._told.startswith(RUN):
            command = self._told.removeprefix(RUN)
            watch = _Command(command, self._over, self._told_so)
            threading.Thread(target=watch.run, name="swift-notice", daemon=True).start()

    def came(self) -> str:
        """What has told so since the last call; empty if nothing has."""
        if self._come or not self._told:
            return ""
        if not self._told.startswith(("SIG", RUN)):
            self._come = os.path.lexists(self._told)
        else:
            self._come = self._wakeup.apart or self._noticed.is_set()
        return f"notice {self._told}" if self._come else ""

    def close(self) -> None:
        self._over.set()

    def _told_so(self) -> None:
        self._noticed.set()
        self._wakeup.tell()


class _Command:
    """Runs a command again and again until it succeeds, on a thread. ``over``: run it no more."""

    def __init__(self, command: str, over: threading.Event, succeeded: Callable[[], None]) -> None:
        # The agent reaps all of its children, so the shell says what the status was.
        self._argv = ["/bin/sh", "-c", f"({command}\n) >/dev/null 2>&1 </dev/null; echo $?"]
        self._over, self._succeeded = over, succeeded

    def run(self) -> None:
        while not self._over.is_set():
            try:
                with subprocess.Popen(self._argv, stdout=subprocess.PIPE, text=True) as shell:
                    assert shell.stdout is not None
                    if shell.stdout.read().strip() == "0":
                        self._succeeded()
                        return
            except OSError:  # no process can be started now
                pass
            self._over.wait(EVERY_S)
