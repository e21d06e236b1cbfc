"""One worker of :mod:`tests.suites.torch_backends`: runs tests of torch's suite for backends, one after the other.

After each it says how the test has ended, and is told whether to continue. A test that fails in some ranks only leaves
them at different places, so the job ends with it, and the next job continues with the tests after it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

FOLDER, NAMES = Path(os.environ["TEMP_DIR"]), json.loads(Path(sys.argv[1]).read_text())
RANK = int(os.environ["RANK"])
#: How long ranks wait for each other at a barrier of the suite, in seconds: 10 s are little on a busy machine.
_BARRIER_S = 60.0


class Trained:
    """Whether a ``DistributedDataParallel`` module has been trained since the last look."""

    def __init__(self) -> None:
        self._found = False
        register_module_forward_hook(self._look)

    def take(self) -> bool:
        found, self._found = self._found, False
        return found

    def _look(self, module: nn.Module, *_: object) -> None:
        self._found |= isinstance(module, DistributedDataParallel) and torch.is_grad_enabled()


def _train_attached() -> None:
    import shared_core

    net = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job = shared_core.attach(net, optimizer)
    for _, x in job.steps(list(torch.ones(6, 2, 4))):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()


def _outcome(name: str) -> tuple[str, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self, *args: object, **kwargs: object) -> None:
            super()._barrier(*args, **(kwargs | {"timeout": _BARRIER_S}))

        def test_control_with_a_step_boundary(self) -> None:
            _train_attached()

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


def main() -> None:
    stock = "SWIFT_BASELINE" in os.environ
    if not stock:
        import shared_core

        shared_core.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    trained = Trained()
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect(str(FOLDER / "runner"))
        answers = runner.makefile("rb")
        number, continues = json.loads(answers.readline()), True  # a replacement begins with the test under way
        while continues:
            how, why = _outcome(NAMES[number])
            said: dict[str, Any] = {"rank": RANK, "how": how, "why": why, "trains": trained.take()}
            runner.sendall(json.dumps(said).encode() + b"\n")
            continues = json.loads(answers.readline() or b"false")
            number += 1
    if stock:
        os._exit(0)


if __name__ == "__main__":
    main()
