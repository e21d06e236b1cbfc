"""One worker of :mod:`tests.suites.torch_backends`: runs tests of torch's suite for backends, one after the other.

A test that fails in some ranks only leaves them at different places. So the job ends with it, and the next job
continues with the tests after it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, NAMES = Path(os.environ["TEMP_DIR"]), json.loads(Path(sys.argv[1]).read_text())
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
#: How long the others may take to say how a test has ended, in seconds.
_MAX_WAIT_S = 60.0


def _outcome(name: str) -> tuple[str, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self, *args: object, **kwargs: object) -> None:
            super()._barrier(*args, **(kwargs | {"timeout": _MAX_WAIT_S}))  # 10 s is little on a busy machine

    test = Suite(name)
    test.rank, test.file_name = RANK, str(FOLDER / "file")
    torch.manual_seed(1234)
    try:
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as ended:
        known = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == ended.code]
        return ("skipped", known[0]) if known else ("failed", f"it ended with {ended.code}")
    except Exception:  # noqa: BLE001 (whatever a test raises)
        return "failed", traceback.format_exc()[-1500:]
    return "passed", ""


def _say(number: int, outcome: str, why: str) -> None:
    path = FOLDER / f"said.{number}.{RANK}"
    partial = FOLDER / f"part.{number}.{RANK}"
    partial.write_text(json.dumps([outcome, why]))
    partial.rename(path)


def _heard(number: int) -> set[str]:
    """How the test has ended in the ranks; more than one outcome where one of them does not say it."""
    paths = [FOLDER / f"said.{number}.{rank}" for rank in range(SIZE)]
    end = time.monotonic() + _MAX_WAIT_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            return {"failed", "hangs"}
        time.sleep(0.01)
    return {json.loads(path.read_text())[0] for path in paths}


def main() -> None:
    if "SWIFT_BASELINE" not in os.environ:
        import shared_core

        shared_core.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for number, name in enumerate(NAMES):
        _say(number, *_outcome(name))
        if len(_heard(number)) > 1:
            (FOLDER / "apart").touch()
            break
    os._exit(0) if "SWIFT_BASELINE" in os.environ else None


if __name__ == "__main__":
    main()
