"""The environment of a worker: torchrun's variables and ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from shared_core.checkpoint.command import Command
from shared_core.events import RUN
from shared_core.launcher.attempt import Attempt
from shared_core.launcher.places import WorkerPlaces
from shared_core.launcher.standby import clean_env
from shared_core.protocol import worker_env


def environment_of(
    places: WorkerPlaces,
    local_rank: int,
    attempt: Attempt,
    store: str,
    job_dir: Path,
    events: str | None,
    config_json: str,
    address: str = "",
    resized: worker_env.Resized | None = None,
    command: Command | None = None,
    run: str = "",
) -> dict[str, str]:
    """What a worker finds in its environment, except its incarnation and the error file.

    Args:
        attempt: its number and generation, and the store for the script's process groups.
        store: where the job's store is.
        events: path of ``events.jsonl``, if there is one.
        config_json: options of the job.
        address: of this machine, where there are several.
        resized: the attempt from which this one continues, if the number of workers has changed.
        run: id of this start of the job.
    """
    spec, member = places.spec, places.workers[local_rank]
    env = worker_env.left_environment(job_dir, member.global_rank) | clean_env(os.environ)
    env |= {
        "RANK": str(member.global_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(places.machine),
        "ROLE_RANK": str(member.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(len(places.workers)),
        "WORLD_SIZE": str(member.world_size),
        "GROUP_WORLD_SIZE": str(places.machines),
        "ROLE_WORLD_SIZE": str(member.role_world_size),
        "MASTER_ADDR": attempt.host,
        "MASTER_PORT": str(attempt.port),
        # A replacement must see what the failed worker saw, so replacements are not counted here.
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        worker_env.JOB_DIR: str(job_dir),
        worker_env.STORE: store,
        worker_env.GENERATION: str(attempt.generation),
        worker_env.EVENTS: events or "",
        worker_env.CONFIG: config_json,
        worker_env.RESTART: str(attempt.number),
        worker_env.COMMAND: (command or Command()).to_json(),
        RUN: run,
    }
    if worker_env.HANDED_OVER in os.environ:
        env[worker_env.HANDED_OVER] = "1"
    if resized is not None:
        env[worker_env.RESIZED] = resized.to_json()
    if address:
        env[worker_env.ADDRESS] = address
        env[worker_env.JOB] = spec.rdzv_handler.get_run_id()
        env[worker_env.MACHINES] = json.dumps(attempt.ledger.machines)
    else:
        # For plain gloo groups, which would otherwise listen at the address of the machine's name.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if spec.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = _device(os.environ, local_rank)
    return env


def _device(environ: Mapping[str, str], local_rank: int) -> str:
    """The one device that a worker sees with ``--virtual-local-rank``, as in torchelastic. May raise ValueError."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return str(local_rank)
    devices = listed.split(",")
    if local_rank >= len(devices):
        raise ValueError(f"local_rank {local_rank} exceeds available GPUs in CUDA_VISIBLE_DEVICES={listed}")
    return devices[local_rank].strip()
