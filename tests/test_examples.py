"""Each example loses workers, and ends with the fingerprints and the numbers of its run without a failure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.system.secret import VARIABLE
from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import ROOT, JobResult, unconfirmed

FOLDER = ROOT / "examples"
#: Arguments that make an example short, and faults: one in the first epoch, one of rank 0 in another.
EXAMPLES: dict[str, tuple[list[str], list[Fault]]] = {
    "lightning_minimal": ([], [Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 60, "update.during", "SIGKILL", nth=3)]),
    "lightning_gpt2": (
        ["--windows", "160", "--epochs", "2"],
        [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 13, "forward", "SIGKILL")],
    ),
    "accelerate_minimal": ([], [Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 60, "forward", "SIGKILL")]),
    "accelerate_text": (
        ["--pairs", "160", "--epochs", "2"],
        [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 13, "forward", "SIGKILL")],
    ),
    "transformers_trainer": (
        ["--windows", "160", "--epochs", "2"],
        [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 13, "forward", "SIGKILL")],
    ),
    "torch_ddp": (
        ["--epochs", "2"],
        [Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 60, "update.during", "SIGKILL", nth=3)],
    ),
    "nanogpt_loop": (
        ["--iterations", "40"],
        [Fault(1, 12, "bucket", "SIGKILL"), Fault(0, 25, "update.during", "SIGKILL", nth=3)],
    ),
    "torch_fsdp2": (
        ["--epochs", "2"],
        [Fault(1, 20, "forward", "SIGKILL"), Fault(0, 60, "update.during", "SIGKILL", nth=3)],
    ),
    "fabric_minimal": ([], [Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 60, "forward", "SIGKILL")]),
}

#: Scripts that destroy their group while DDP holds it, which stock gloo may hang in.
OF_TORCH = ("torch_ddp", "nanogpt_loop")


def ends(result: JobResult, workers: int = 2) -> list[str]:
    """Fingerprints of all ranks, and what was measured."""
    assert result.status == 0, result.tail()
    fingerprints = sorted(set(re.findall(r"rank \d: [0-9a-f]{16}", result.stdout)))  # lines may run together
    assert len(fingerprints) == workers, result.tail()
    return fingerprints + sorted(re.findall(r"(?:accuracy|validation loss|'eval_loss':) '?[\d.]+", result.stdout))


@pytest.mark.parametrize("name", few(EXAMPLES, "torch_ddp"))
def test_an_example_loses_workers(name: str, jobs: Jobs) -> None:
    args, faults = EXAMPLES[name]
    script = str(FOLDER / f"{name}.py")
    reference = jobs.reference(script, args=args, launcher="swiftrun" if name in OF_TORCH else "plain")
    result = jobs.run(script, args=args, faults=faults)
    assert not unconfirmed(result) and not result.kinds("restart"), result.tail()
    assert ends(result) == ends(reference)
    assert len(ends(reference)) > 2, reference.tail()


def test_the_script_for_slurm_is_that_of_the_page() -> None:
    """Which ``tests/test_slurm.py`` runs under SLURM."""
    assert f"```bash\n{(FOLDER / 'slurm.sbatch').read_text()}```" in (ROOT / "docs" / "clusters.md").read_text()


def in_the_pod(text: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of ``$(NAME)`` in a command."""
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)


@pytest.mark.nightly
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")
def test_the_command_of_the_jobset_loses_a_worker_and_a_machine(jobs: Jobs) -> None:
    """Pods are network namespaces; of the manifest, what a pod runs and is told is taken, not the paths in it."""
    manifest: dict[str, Any] = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    name, subdomain = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    [job] = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]["completions"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env.pop(VARIABLE).startswith(container["volumeMounts"][2]["mountPath"])  # the test has a file of its own
    out = jobs.folder("kubernetes")
    env |= {"SHARED": str(out), "CODE": str(FOLDER)}
    program, *command = (in_the_pod(word, env) for word in container["command"])
    assert program == "swiftrun"
    faults = f"--faults={out / 'faults.json'}"
    called = [f"{name}-{job['name']}-0-{pod}.{subdomain}" for pod in range(pods)]
    with machines(pods) as on:
        cluster = Cluster(
            jobs.warm,
            on,
            out,
            Path(command[-1]),
            faults=[Fault(1, 10, "bucket", "SIGKILL")],
            command=[faults, *command],
            called=called,
            env=env,
        )
        cluster.until(lambda: "rank 1 is back" in cluster.said(0), 60.0)
        failed = next(place for place in (1, 2) if "waits as a spare" not in cluster.said(place))
        on[failed].kill()
        result, statuses = cluster.finish(100.0)
    assert sorted(statuses) == [-9, 0, 0] and not result.kinds("restart"), result.tail()
    result.stdout = "".join(path.read_text() for path in sorted(out.glob("stdout.*.txt")))
    reference = jobs.reference(command[-1], nproc=4, launcher="swiftrun")
    assert ends(result, 4) == ends(reference, 4)


def test_every_example_is_in_the_table() -> None:
    named = set(re.findall(r"\]\(([\w/.]+)\)", (FOLDER / "README.md").read_text()))
    here = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sbatch", ".yaml")}
    assert here - {"__init__.py", "gpt2_layers.py"} <= named
