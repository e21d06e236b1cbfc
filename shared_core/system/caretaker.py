"""A small process that removes the folders of a job whose launcher was killed.

The kernel kills the workers and standbys of a killed launcher, so none of them can. This file is run by its path in a
bare interpreter, which takes some 10 ms, and imports nothing of this package then.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

#: Seconds in which the folders are removed again and again: processes of the job may write for an instant while the
#: kernel ends them.
_TRIES_S, _AGAIN_S = 10.0, 0.05


class Caretaker:
    """Waits until this process is gone, then removes ``folders``, unless it is closed before."""

    def __init__(self, folders: Sequence[str]) -> None:
        read, self._held = os.pipe()  # close-on-exec: this process alone holds it
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", __file__, *map(os.path.abspath, folders)],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            pass  # then the next start of a job sweeps
        finally:
            os.close(read)

    def close(self) -> None:
        """The folders are this process' own to remove."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            os.close(self._held)


def main(folders: Sequence[str]) -> None:
    """Wait for the end of standard input, then remove the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends the job ends the launcher
    try:
        with open("/proc/self/comm", "w") as name:
            name.write("swift caretaker")
    except OSError:
        pass
    while os.read(0, 4096):
        pass
    end = time.monotonic() + _TRIES_S
    while left := [folder for folder in folders if os.path.lexists(folder)]:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > end:
            break
        time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main(sys.argv[1:])
