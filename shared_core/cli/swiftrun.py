"""``swiftrun``: torchrun's flags; a failed worker is replaced and its siblings continue."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shared_core.cli import arguments, serving
from shared_core.cli.job_options import build_config, check_folders, find_section
from shared_core.config.page import help_of
from shared_core.errors import ConfigError, OutOfResources, SwiftError, told
from shared_core.events import console
from shared_core.faults import inject
from shared_core.handover import srun_tasks
from shared_core.kinds import check_host, check_length, check_regular, no_folder
from shared_core.launcher.standby import Preload, Standby, clean_env
from shared_core.resources import advice, what_to_do
from shared_core.system.caretaker import Caretaker
from shared_core.system.process import set_name
from shared_core.system.streams import forgive
from shared_core.worker.start import preload

DEFAULT_BUDGET = 100
#: Longest name of a job, in bytes. With what is appended it must be a folder's name.
_LONGEST_ID = 200
#: Of torchrun's options, those of the short help.
_COMMON = ("nproc_per_node", "nnodes", "rdzv_endpoint", "rdzv_id", "max_restarts", "log_dir", "module")
#: Imported early where a script mentions DeepSpeed.
_WARM = "shared_core.pipeline.warm"
#: Rendezvous backends that a command line for one machine may name; none of them is used.
_ALONE = ("static", "c10d", "etcd", "etcd-v2")


def get_args_parser() -> argparse.ArgumentParser:
    """torchrun's parser and our options; each can also be set as ``PET_<OPTION>`` in the environment."""
    from torch.distributed.argparse_util import env

    _check_switches()
    parser = arguments.Parser(
        prog="swiftrun",
        allow_abbrev=False,  # options of the script may begin like one of ours
        description="Starts a distributed training job with torchrun's flags. A worker that fails is replaced, bit for "
        "bit; the other workers continue.",
        parents=[_torchrun_parser()],
        add_help=False,  # torchrun's has it
    )
    parser.tell_version()
    for action in parser._actions:
        action.type = arguments.TORCHRUN.get(action.dest, action.type)
        if action.dest == "max_restarts":
            action.help = (
                "How many failed workers may be replaced in the whole job (a restart of all counts once). "
                f"Default: {DEFAULT_BUDGET}."
            )
            if "PET_MAX_RESTARTS" not in os.environ:
                action.default = DEFAULT_BUDGET
        elif action.dest == "nnodes":
            action.help = (
                "Number of machines, one agent on each, or MIN:MAX: the job continues while there are at "
                "least MIN, and admits others up to MAX. Default: 1."
            )
        elif action.dest == "shutdown_timeout":
            action.help = "Time in seconds that workers have to end before they are killed. Default: 5."
    ours = parser.add_argument_group("recovery")

    def flag(name: str, text: str, **more: Any) -> None:
        spelled = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        ours.add_argument(*spelled, action=env, help=text, **{"default": None, **more})

    flag(
        "standbys",
        "Standby processes that have imported what the job imports and from which workers are forked. "
        "0: every worker is a fresh interpreter, and a replacement waits for its imports. Default: 1.",
        type=arguments.whole(),
        default=1,
    )
    flag(
        "prepared",
        "Standbys that have run the script up to its first batch and wait for the place of one rank each, on each "
        "machine: a failure there does not wait for the script's start-up. auto: where that pays and memory allows. "
        "Default: auto.",
        metavar="K",
    )
    flag("on-failure", help_of("on_failure"), choices=("replace", "reroute", "shrink", "restart"))
    flag("swift-config", "YAML or JSON file of options (SwiftConfig).")
    flag("events", "File that events are appended to. Default: events.jsonl in --log-dir, or in the current folder.")
    flag("checkpoint-dir", help_of("checkpoint.dir"))
    flag(
        "preload",
        "Comma-separated modules that standbys import besides those the script mentions.",
        default="",
        metavar="MODULES",
    )
    flag(
        "crash-loop",
        "A rank that dies K times in a row, alike and without progress, ends the job. Default: 3.",
        type=arguments.whole(1),
        default=3,
        metavar="K",
    )
    ours.add_argument(
        "--prefix",
        action="store_true",
        help="Begin each line of a worker with [rank N].",
    )
    flag(
        "spare-nodes",
        "Machines beyond --nnodes that may join and wait, to take the place of one that fails. Default: 0.",
        type=arguments.whole(),
        default=0,
        metavar="K",
    )
    ours.add_argument(
        "--resume",
        action="store_true",
        help="Begin from the newest checkpoint that an earlier start of this command has left (on several machines: a "
        "job with this --rdzv-id), if any. With --on-failure restart that is the default.",
    )
    flag(
        "resume-from",
        "Begin with this checkpoint, whatever command has made it: the folder of one (step-...), or a folder of "
        "checkpoints, of which the newest whole one is taken. The next start continues with what this one makes.",
        metavar="PATH",
    )
    flag(
        "secret-file",
        "Several machines: file (mode 0600) of a secret, equal on all of them, by which they know each other. "
        "Default: SWIFT_RECOVERY_SECRET_FILE, else ~/.config/swift-recovery/secret.",
        metavar="PATH",
    )
    flag(
        "port",
        "Port of the store for process groups; several machines answer each other at the next. Default: free ones.",
        type=arguments.whole(1, 65534),
    )
    flag(
        "lease",
        "A machine counts as failed after so long without a sign of life. Default: 2.",
        type=arguments.number(0.2, 3600.0),
        default=2.0,
        metavar="SECONDS",
    )
    serving.add_flags(flag)
    parser.add_argument_group("tests").add_argument(
        "--faults",
        default=None,
        metavar="FILE",
        help="JSON list of faults that strike workers, see shared_core/faults/spec.py.",
    )
    own = [action.dest for action in ours._group_actions]
    parser.tell_briefly(
        "swiftrun [OPTIONS] SCRIPT [ARGUMENTS]",
        {"recovery": own, "workers": _COMMON, "tests": ["faults"]},
    )
    return parser


def _torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's own parser; that of an older torch with what it lacks."""
    from torch.distributed.argparse_util import env
    from torch.distributed.run import get_args_parser as torchrun_parser

    parser: argparse.ArgumentParser = torchrun_parser()
    if parser.get_default("master_port") is not None and "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # up to torch 2.11 29500: it could not be told whether it was asked for
    if all(action.dest != "shutdown_timeout" for action in parser._actions):  # up to torch 2.11
        parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, default=None)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse; what torchrun fills in for a job on one machine is filled in. Raises ConfigError for an option that this
    version cannot honour.
    """
    from torch.distributed.run import parse_min_max_nnodes

    args = get_args_parser().parse_args(argv)
    low, high = parse_min_max_nnodes(args.nnodes)
    args.several = high > 1 or args.spare_nodes > 0
    args.machines = (low, high)
    if args.several:
        _check_rendezvous(args)
    elif args.rdzv_backend not in _ALONE:
        raise ConfigError(
            f"--rdzv-backend {args.rdzv_backend}: one machine needs no rendezvous; leave it out, or give one of "
            f"{', '.join(_ALONE)}"
        )
    if args.numa_binding is not None:
        raise ConfigError("--numa-binding is not supported in this version: bind in the script, or use torchrun")
    if args.module and args.no_python:
        raise ConfigError("--module and --no-python exclude each other")
    args.own_logs = args.log_dir is None and args.redirects == args.tee == "0"
    if args.prefix and args.tee == "0":
        args.tee = "3"
    _check_run_id(args.rdzv_id)
    if args.local_addr is not None:
        check_host(f"--local-addr {args.local_addr!r}", args.local_addr)
    args.store_port = args.port or 0
    if not args.several and (args.standalone or args.rdzv_backend in ("static", "etcd")):
        # One machine needs no meeting point; the port asked for becomes the store's.
        args.store_port = args.store_port or args.master_port or 0
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = args.rdzv_id if args.rdzv_id != "none" and not args.standalone else str(uuid.uuid4())
    args.master_port = args.master_port or 29500
    return args


def _check_run_id(run_id: str) -> None:
    """Folders are named after it."""
    if "/" in run_id or len(os.fsencode(run_id)) > _LONGEST_ID or not run_id.isprintable():
        raise ConfigError(
            f"--rdzv-id {run_id!r:.100} must have at most {_LONGEST_ID} bytes, without '/' and control characters: "
            "folders are named after it"
        )


def _check_switches() -> None:
    """Check switches that torchrun reads from the environment without checking them."""
    for name in ("STANDALONE", "MODULE", "NO_PYTHON", "RUN_PATH", "VIRTUAL_LOCAL_RANK"):
        if (value := os.environ.get(f"PET_{name}", "0")) not in ("0", "1"):
            raise ConfigError(f"PET_{name} must be 0 or 1, got {value!r}")


def _check_program(args: argparse.Namespace) -> None:
    """Is there what is to be run, and can there be logs?"""
    target = args.training_script
    if args.no_python and not args.run_path:
        if shutil.which(target) is None:
            raise ConfigError(f"--no-python: the program {target!r} does not exist or cannot be executed")
    elif args.module:
        if not preload.is_there(target):
            raise ConfigError(f"--module: the module {target!r} does not exist here or in the Python path")
    elif not os.path.exists(target):
        raise ConfigError(f"the training script {target!r} does not exist")
    elif not os.path.isdir(target):
        check_regular(f"the training script {target!r}", target)
    elif not os.path.exists(os.path.join(target, "__main__.py")):
        raise ConfigError(f"the training script {target!r} must be a file, or a folder with __main__.py")
    if args.log_dir is not None:
        check_length(f"--log-dir {args.log_dir}", args.log_dir)
    if args.log_dir is not None and (found := no_folder(args.log_dir)):
        raise ConfigError(f"--log-dir {args.log_dir}: {found} is not a folder")


def _check_rendezvous(args: argparse.Namespace) -> None:
    """Several machines: is it said where they meet?"""
    from shared_core.launcher.rendezvous_store import BACKENDS, C10D, parse_endpoints

    if args.standalone:
        raise ConfigError("--standalone is for one machine: leave it out, or leave out --nnodes and --spare-nodes")
    if args.rdzv_backend == "static":
        # torchrun's default for --master-addr: the machines meet there
        args.rdzv_backend = C10D
        if not args.rdzv_endpoint and args.master_addr:
            args.rdzv_endpoint = f"{args.master_addr}:{args.master_port or 29500}"
    if args.rdzv_backend == "etcd-v2":
        raise ConfigError("--rdzv-backend etcd-v2: etcd 3.6 has no v2 API any more; use etcd, which needs 3.4 or later")
    if args.rdzv_backend not in BACKENDS:
        raise ConfigError(f"--rdzv-backend {args.rdzv_backend}: several machines need one of {', '.join(BACKENDS)}")
    if not args.rdzv_endpoint:
        raise ConfigError("several machines need --rdzv-endpoint HOST:PORT, where they meet")
    parse_endpoints(args.rdzv_endpoint, args.rdzv_backend)


def _events_path(args: argparse.Namespace) -> str | None:
    if args.events == "":
        return None
    if args.events:
        path = Path(args.events)
    else:
        path = Path(args.log_dir or ".") / "events.jsonl"
    flag = f"--events {path}" if args.events else str(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} must lie in a folder that is there or can be made: {error}") from error
    check_regular(flag, path, null=True)
    return str(path.absolute())


def _rendezvous(args: argparse.Namespace, torchrun: Any) -> Any:
    if not args.several:
        return None
    from shared_core.launcher.rendezvous import Rendezvous, RendezvousOptions
    from shared_core.launcher.rendezvous_store import Register, parse_endpoints

    conf = torchrun.rdzv_configs
    endpoints = parse_endpoints(torchrun.rdzv_endpoint, torchrun.rdzv_backend)
    register = Register(torchrun.rdzv_backend, endpoints, torchrun.run_id, conf, timeout_s=max(1.0, args.lease / 2))
    options = RendezvousOptions(
        nnodes=torchrun.max_nodes,
        least=torchrun.min_nodes,
        last_call_s=float(conf.get("last_call_timeout", 30)),
        spares=args.spare_nodes,
        nproc=torchrun.nproc_per_node,
        lease_s=args.lease,
        resume=args.resume,
        join_s=float(conf.get("join_timeout", 600)),
        address=torchrun.local_addr,
        port=args.port or 0,
    )
    return Rendezvous(register, options)


def _before_the_program(modules: Sequence[str], section: bool) -> tuple[str, ...]:
    """What a worker imports before its program: process groups are ready then, and so are engines of DeepSpeed.

    Args:
        modules: what its program mentions.
        section: a configuration of DeepSpeed with a section of ours was found; others may be made at run time.
    """
    if section:
        return ("shared_core.pipeline.autoload",)
    if _WARM in modules and preload.is_there("deepspeed"):
        return ("shared_core.prepared", "shared_core.pipeline.engine_choice")
    return ("shared_core.prepared",)


def _one_thread_each(workers: int) -> str:
    """As torchrun does, so that workers do not take each other's cores, but without its banner. Returns what to say."""
    if workers < 2 or "OMP_NUM_THREADS" in os.environ:
        return ""
    os.environ["OMP_NUM_THREADS"] = "1"
    return "1 thread each, as OMP_NUM_THREADS is not set"


def launch(args: argparse.Namespace, early: Standby | None = None) -> None:
    """Run the job to its end.

    Args:
        args: from :func:`parse_args`.
        early: a standby that is importing already.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: the job failed; holds the first error.
        SystemExit: the job failed, and its last line has said all.
        torch.distributed.elastic.multiprocessing.SignalException: the agent was told to end.
        SwiftError: for options that cannot be honoured.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, determine_local_world_size

    from shared_core.launcher.agent import Agent
    from shared_core.launcher.elastic import raise_failure
    from shared_core.launcher.logs import WorkerLogs
    from shared_core.launcher.starting import AgentOptions, Program
    from shared_core.system.secret import find

    threads = torch.get_num_threads()
    _check_program(args)
    set_name("agent")
    try:
        note = _one_thread_each(determine_local_world_size(args.nproc_per_node))
        torchrun, _, _ = config_from_args(args)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if torchrun.max_nodes == 1 and srun_tasks() > 1 and os.environ.get("SLURM_PROCID") == "0":
        console(
            f"srun has started swiftrun {srun_tasks()} times, and each runs a job of its own. For one job: srun -N1 -n1"
        )
    mode: Any = "exec" if args.no_python and not args.run_path else "module" if args.module else "script"
    extra = [name.strip() for name in args.preload.split(",") if name.strip()]
    script = preload.find_script(args.training_script, module=args.module) if mode != "exec" else None
    section = find_section(script, args.training_script_args) if mode != "exec" else None
    modules = tuple(preload.installed(preload.modules_for(script, extra)))
    config = build_config(args, section)
    check_folders(args, config)
    program = Program(
        mode,
        args.training_script,
        tuple(args.training_script_args),
        modules,
        () if preload.trains_nothing(script) else _before_the_program(modules, section is not None),
    )
    rendezvous = _rendezvous(args, torchrun)
    events = _events_path(args)
    servers = serving.Servers(config, events)
    options = AgentOptions(
        config=config,
        run_id=torchrun.run_id,
        nproc=torchrun.nproc_per_node,
        max_restarts=torchrun.max_restarts,
        monitor_interval=float(torchrun.monitor_interval),
        role=torchrun.role,
        local_addr=torchrun.local_addr,
        event_log_handler=torchrun.event_log_handler,
        virtual_local_rank=torchrun.virtual_local_rank,
        standbys=args.standbys,
        events=events,
        grace_s=float(args.shutdown_timeout) if args.shutdown_timeout is not None else 5.0,
        threads=threads,
        loop_limit=args.crash_loop,
        signals=tuple(name.strip() for name in torchrun.signals_to_handle.split(",")),
        store_port=args.store_port,
        machines=args.machines,
        note=note,
        secret=find(args.secret_file) if args.several else b"",
    )
    logs_specs = torchrun.logs_specs or DefaultLogsSpecs()

    def make_logs(ranks: list[int]) -> WorkerLogs:
        return WorkerLogs(
            torchrun.role,
            logs_specs,
            torchrun.nproc_per_node,
            torchrun.run_id,
            prefix=torchrun.log_line_prefix_template or ("[rank ${rank}] " if args.prefix else None),
            ranks=ranks,
            stdout_filters=torchrun.duplicate_stdout_filters or (),
            stderr_filters=torchrun.duplicate_stderr_filters or (),
        )

    agent = Agent(program, options, rendezvous, make_logs, early)
    # Made by torchelastic for error files, and for what is only passed on.
    own_logs = [logs_specs.root_log_dir] if args.own_logs else []
    caretaker = Caretaker([*agent.folders, *own_logs])
    servers.serve(agent.job_dir)
    failed = True
    try:
        result = agent.run()
        agent.records.succeeded()
        if result.is_failed():
            raise_failure(os.path.basename(args.training_script), result.failures)
        failed = False
    except ChildFailedError:
        raise
    except Exception:
        agent.records.failed()
        raise
    finally:
        servers.close()
        if rendezvous is not None:
            rendezvous.close()
        caretaker.close()
        if not failed and not agent.logs_used:
            for folder in own_logs:
                shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Console script.

    Exit codes are torchrun's: 0, 1 if the job failed or was ended by a signal, 2 for a wrong command line.
    """
    forgive()
    ignored = inject.take_out(os.environ)  # before anything is started that would inherit it
    early = _start_early(sys.argv[1:] if argv is None else argv)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from shared_core.launcher.rendezvous import JobOver

    try:
        args = parse_args(argv)
        if args.faults is not None:
            os.environ.update(inject.variables(inject.read_file(args.faults)))
        elif ignored:
            console(f"{inject.FAULTS} in the environment has no effect: faults are armed by --faults FILE")
        record(launch)(args, early if args.standbys and not args.no_python else None)
    except JobOver as error:
        print(f"swiftrun: {arguments.one_line(error)}", file=sys.stderr)
        raise SystemExit(int(error.failed)) from None
    except OutOfResources as error:
        print(f"swiftrun: {arguments.one_line(told(error))}", file=sys.stderr)
        raise SystemExit(1) from None
    except SwiftError as error:
        _refuse(error)
    except OSError as error:
        if not advice(error):
            raise
        named = f"{error.filename} " if error.filename else ""
        print(f"swiftrun: {arguments.one_line(named + what_to_do(error))}", file=sys.stderr)
        raise SystemExit(1) from None
    except (SignalException, RendezvousError) as error:
        print(f"swiftrun: {arguments.one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        if early is not None:
            early.close()


def _start_early(argv: Sequence[str]) -> Standby | None:
    """A standby that imports torch while this process does; None if the words of the command line speak against one."""
    joined = " ".join(argv).replace("_", "-")
    if (
        not argv
        or {"-h", "--help", "--version", "--no-python"}.intersection(joined.split())
        or re.search(r"--standbys[ =]0\b", joined)
    ):
        return None
    if os.environ.get("PET_STANDBYS") == "0":
        return None
    try:
        standby = Standby(clean_env(os.environ))
    except OSError:
        return None  # the agent tries again, and says so
    standby.preload(Preload(preload.ALWAYS), more=True)
    return standby


def _refuse(error: SwiftError) -> NoReturn:
    print(f"swiftrun: {arguments.one_line(told(error))}", file=sys.stderr)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
