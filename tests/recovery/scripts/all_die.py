"""``plain_ddp.py`` in which rank 0 kills all workers, itself last, at one moment of the first attempt."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.support.report import OUT, Report

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plain_ddp  # noqa: E402

count = Report.count


def count_or_kill(self: Report, key: str) -> None:
    count(self, key)
    if (key, self.who["rank"], self.who["restart"]) == ("batch 6", 0, 0) and not os.environ.get("SWIFT_BASELINE"):
        lines = (Path(os.environ[OUT]) / "workers.jsonl").read_text().splitlines()
        for pid in {int(json.loads(line)["pid"]) for line in lines} - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Report.count = count_or_kill  # type: ignore[method-assign]
    plain_ddp.main()
