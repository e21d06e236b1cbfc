"""What MACs cost: copies of the training state between two processes of this machine, with MACs and without.

The two take turns, so that whatever else the machine does hits both. The server is a process of its own, as another
machine's agent is; there is no network between them, so what the MACs take is not hidden by it. Jobs always have MACs:
here the proof of the secret is left out on one of two connections, so that it has no key.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

from benchmarks.common import QUICK, ROOT, Row, arguments, begin, finish, say
from shared_core.system import secret
from shared_core.worker.state.publications import Mirror

SERVER = """
import sys
from pathlib import Path
from shared_core.launcher.mirror import MirrorServer
from shared_core.system import secret
if sys.argv[2] == "without MACs":
    secret.ask = lambda sock, key: None
print(MirrorServer(Path(sys.argv[1]), key=b"k" * 32).port, flush=True)
sys.stdin.read()
"""
#: Bytes of a publication, how often it is sent in a round, and rounds.
SIZES = {"4 KiB": (4 << 10, 50, 40), "1 MiB": (1 << 20, 10, 40), "64 MiB": (64 << 20, 1, 9)}
WITHOUT, WITH = "without MACs", "with MACs"


def send(mirror: Mirror, size: int, times: int) -> tuple[float, float]:
    """Seconds that a publication takes until the other side has it, and seconds of processor time in this process."""
    data = bytes(size)
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        mirror.write("boundary.1", [data])
        mirror.sync()
    return (time.perf_counter() - begun) / times, (time.process_time() - used) / times


def measure(folder: Path, quick: bool) -> list[Row]:
    """All rows."""
    rows = []
    with ExitStack() as stack:
        mirrors = {}
        for at, name in enumerate((WITHOUT, WITH)):
            command = [sys.executable, "-c", SERVER, str(folder / f"kept{at}"), name]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            stack.enter_context(server)
            stack.callback(server.stdin.close)  # type: ignore[union-attr]
            own = folder / f"own{at}"
            own.mkdir()
            port = int(server.stdout.readline())  # type: ignore[union-attr]
            mirror = mirrors[name] = Mirror(0, 0, 0, own, b"k" * 32)
            stack.callback(mirror.follow, ())
            with patch.object(secret, "prove", lambda sock, key: None) if name == WITHOUT else nullcontext():
                mirror.follow((None, f"127.0.0.1:{port}#x"))
                mirror.sync()  # it connects on a thread
        for case, (size, times, rounds) in SIZES.items():
            say(f"{case}")
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in mirrors}
            for _ in range(2 if quick else rounds):
                for name, mirror in mirrors.items():
                    took[name].append(send(mirror, size, times))
            for name, seconds in took.items():
                fastest, used = map(min, zip(*seconds, strict=True))  # what else the machine does only adds to it
                rows.append(Row(case, f"time {name}", 1e6 * fastest, "us"))
                rows.append(Row(case, f"rate {name}", size / fastest / 1e6, "MB/s"))
                rows.append(Row(case, f"sender's processor time {name}", 1e6 * used, "us"))
    return rows


def main() -> int:
    """Run it; the exit status is 0."""
    options = begin(arguments("copies", __doc__ or ""))
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
        return finish(measure(Path(folder), options.size == QUICK), options)


if __name__ == "__main__":
    sys.exit(main())
