"""Who can reach a job on one machine: nobody from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from util import run

#: Lists where the processes of the job listen: agent, workers, standby, writer.
LISTENERS = """
import json, os
from pathlib import Path
tag = os.environ["SWIFT_TEST_TAG"].encode()
def listeners():
    tables = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                tables[columns[9]] = columns[1].partition(":")[0]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and tag in (entry / "environ").read_bytes():
                own = []
                for fd in os.listdir(entry / "fd"):
                    try:
                        own.append(tables[os.readlink(entry / "fd" / fd)[8:-1]])
                    except (KeyError, FileNotFoundError):
                        pass  # something else, or closed meanwhile
                found.append({"name": (entry / "comm").read_text().strip(), "at": own})
        except OSError:
            continue
    os.write(1, (json.dumps(found) + "\\n").encode())
"""

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
    assert len(seen) == looks and len(job.of("newcomer_start")) == looks - 1, job.stderr
    for processes in seen:
        where = {each["name"]: set(each["at"]) for each in processes}
        assert where["swift agent"] and where["swift rank 0"] and where["swift rank 1"], where
        assert set().union(*where.values()) == {"0100007F"}, where  # 127.0.0.1
