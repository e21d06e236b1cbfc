"""Who can reach a job on one machine: nobody from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from util import LISTENERS, run

TRAINING = """
import signal, torch, torch.distributed as dist
import shared_core
shared_core.install()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(net.parameters())
job = shared_core.attach(net, optimizer)
group = dist.new_group([0, 1])
for epoch in job.epochs(1):
    for step, (x,) in job.steps(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), 2)):
        net(x).sum().backward()
        dist.all_reduce(torch.ones(1), group=group)
        if dist.get_rank() == 0 and step in (1, 5):
            listeners()
        if dist.get_rank() == 1 and step == 3 and os.environ["SWIFT_RECOVERY_INCARNATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
"""

PLAIN = """
import torch, torch.distributed as dist
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    listeners()
dist.barrier()
"""


@pytest.mark.parametrize(
    ("script", "looks", "options"),
    [(TRAINING, 2, []), pytest.param(PLAIN, 1, ["--standalone"], marks=pytest.mark.nightly)],
)
def test_nothing_listens_to_other_machines(tmp_path: Path, script: str, looks: int, options: list[str]) -> None:
    """Before and after a recovery; also where the script uses torch's own gloo."""
    job = run(tmp_path, LISTENERS + script, options=options)
    assert job.code == 0, job.stderr
    seen = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("[{")]
    assert len(seen) == looks and len(job.of("replacement_start")) == looks - 1, job.stderr
    for processes in seen:
        where = {each["name"]: set(each["at"]) for each in processes}
        assert where["swift agent"] and where["swift rank 0"] and where["swift rank 1"], where
        assert set().union(*where.values()) == {"0100007F"}, where  # 127.0.0.1
