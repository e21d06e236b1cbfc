"""How a started process becomes a worker: its own session, the asked environment and files, then the user's program.

A forked zygote and a fresh interpreter (``--standbys 0``) go through the same code, so that both look alike to the
user's program, and both look like ``python script.py`` started by torchrun.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import hashlib
import importlib
import io
import os
import runpy
import signal
import sys
import traceback
import types
from contextlib import ExitStack, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from shared_core.errors import ConfigError, MissingExtra, OutOfResources, Unsupported
from shared_core.events import JOB_DIR, console
from shared_core.protocol.request import Mode, StartRequest
from shared_core.resources import what_to_do
from shared_core.system import process
from shared_core.system.process import set_title
from shared_core.system.streams import forgive
from shared_core.worker import link
from shared_core.worker.start import hot_standby, preload, truncation
from shared_core.worker.start.hot_standby import note_inherited

_HERE = Path(__file__).resolve()


def enter(request: StartRequest, *, forked: bool) -> None:
    """Run the user's program in this process; returns or raises what a main program returns or raises.

    ``forked``: from a zygote, whose imports carry state that a fresh interpreter would not have.

    Raises:
        SystemExit: as the program asked, or with code 1 after an uncaught exception, which is then in the error file
            and printed.
    """
    _detach(request)
    _redirect(request)
    os.environ.clear()
    os.environ.update(request.env)
    if request.mode == "exec":
        _exec(request)
    forgive()
    hot_standby.begin()
    who = f"standby of rank {request.env['RANK']}" if hot_standby.is_hot_standby() else f"rank {request.env['RANK']}"
    set_title(who, request.target, request.args)
    if forked:
        _freshen(request)
    # First registered, so last to run: everything else that ends a worker still has its peers.
    atexit.register(link.say_done_and_wait)
    try:
        _run(request)
    except SystemExit as end:
        if end.code not in (None, 0) and hot_standby.is_hot_standby():
            os._exit(1)  # exit handlers are a worker's
        raise


def _detach(request: StartRequest) -> None:
    """Own session and process group, default signals, death with the agent."""
    if os.getpid() != os.getpgid(0):
        os.setsid()
    signal.set_wakeup_fd(-1)
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(sig, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the program runs: a Ctrl-C before that ends without a word
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if not process.die_with_parent(request.agent):
        os._exit(128 + signal.SIGKILL)  # the agent died while this process was being made: nobody would end it


def _redirect(request: StartRequest) -> None:
    for path, stream, fd in ((request.stdout, sys.stdout, 1), (request.stderr, sys.stderr, 2)):
        if path:
            if stream is not None:
                stream.flush()
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:
                who = f"rank {request.env.get('RANK', '?')}"
                console(f"{who} writes here and not to {path}, which cannot be opened {what_to_do(error)}")
                continue
            os.dup2(file, fd)
            os.close(file)


def _exec(request: StartRequest) -> NoReturn:
    try:
        os.execvp(request.target, [request.target, *request.args])
    except OSError as error:
        rank = request.env.get("RANK", "?")
        console(f"rank {rank} cannot run {request.target}: {error}")
        os._exit(127)


def _freshen(request: StartRequest) -> None:
    """Undo what differs between a forked zygote and a fresh interpreter that imported the same modules."""
    if (random := sys.modules.get("random")) is not None:
        random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # the CPU's only: those of devices begin with a fixed seed
        if request.threads > 1:
            torch.set_num_threads(request.threads)
    rank = int(request.env["RANK"])
    for name in (
        "lightning_utilities.core.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
    ):
        only = getattr(sys.modules.get(name), "rank_zero_only", None)
        if only is not None and hasattr(only, "rank"):
            only.rank = rank  # fixed at import, where the zygote had no rank


def _run(request: StartRequest) -> None:
    target, args = request.target, list(request.args)
    sys.argv = [target, *args]
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if request.mode == "module" else []), target, *args]
    if process.PACKAGE_ROOT not in sys.path[1:]:
        sys.path.append(process.PACKAGE_ROOT)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    faulthandler.enable(all_threads=True)
    try:
        for name in request.first:
            importlib.import_module(name)
        truncation.watch()
        note_inherited()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            _run_program(request.mode, target, main)
        except SystemExit as end:
            if end.code in (None, 0):
                _program_ended()
            raise
        _program_ended()
    except SystemExit as end:
        if end.code not in (None, 0):
            link.mark_failed(end.code & 0xFF if isinstance(end.code, int) else 1)
        raise
    except KeyboardInterrupt:
        link.mark_failed()
        sys.excepthook = lambda *_: None  # the launcher has said that the job is ended, and where this was is no error
        raise
    except Exception as error:
        link.mark_failed(1)
        error.__traceback__ = _user_frames(error.__traceback__)
        # as torchelastic's @record does
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):  # a full disk: the exception is still printed
            get_error_handler().record_exception(error)
        if request.stderr or not isinstance(error, (ConfigError, MissingExtra, OutOfResources, Unsupported)):
            _print_exception(error)
        else:
            _print_once(error, Path(request.env[JOB_DIR]))
        raise SystemExit(1) from None


def _program_ended() -> None:
    """A hot standby whose program ends has met no step boundary: it exits, and says no goodbye."""
    if hot_standby.is_hot_standby():
        os._exit(0)
    link.program_ended()


def _run_program(mode: Mode, target: str, main: types.ModuleType) -> None:
    if mode == "module":
        _set_first_path(os.getcwd())
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what ``python -m`` itself calls
    elif os.path.isdir(target) or target.endswith((".zip", ".pyz")):
        _set_first_path(target)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        _set_first_path(os.path.dirname(os.path.realpath(target)))
        _exec_script(target, main)


def _set_first_path(entry: str) -> None:
    """The program's own folder comes first. Modules of the same names that are already imported are forgotten."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, entry)
        preload.make_way(Path(entry))


def _exec_script(path: str, main: types.ModuleType) -> None:
    """Run a script in ``main`` as the interpreter does; ``runpy.run_path`` would take ``__main__`` away too early."""
    absolute = os.path.abspath(path)
    main.__dict__.update(
        __file__=absolute, __cached__=None, __spec__=None, __loader__=SourceFileLoader("__main__", absolute)
    )
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_next is not None and _ours(trace):
        trace = trace.tb_next
    return trace


def _print_once(error: Exception, job_dir: Path) -> None:
    """As :func:`_print_exception`, once on this machine: often all workers raise the same error about the script."""
    name = hashlib.sha256(f"{type(error).__name__}: {error}".encode(errors="replace")).hexdigest()[:16]
    with ExitStack() as held:
        try:
            file = held.enter_context(open(job_dir / f"raised-{name}", "a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is printed: who comes second may have the job ended
            file.seek(0)
            if file.read(1):
                return
        except OSError:
            file = None
        _print_exception(error)
        if file is not None:
            with suppress(OSError):
                file.write(b"1")


def _print_exception(error: Exception) -> None:
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


def _ours(trace: types.TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name in (str(_HERE), __file__) or "runpy" in name


def main() -> None:
    """A fresh interpreter: the request comes on the descriptor named on the command line."""
    atexit.register(link.leave)
    fd = int(sys.argv[1])
    with open(fd, "rb") as pipe:
        request = StartRequest.from_json(pipe.read())
    enter(request, forked=False)
