"""Signals in a worker: which of them are the agent's."""

from __future__ import annotations

import os
import signal
import threading

from shared_core.protocol.keys import EARLY_SIGNALS


def leave_signals_to_the_agent() -> None:
    """Ignore the signals that SLURM sends to every process of a step: the agent gets them and ends the workers itself.

    A handler that the program has set stays. So does SIGTERM's default outside SLURM, where it is sent to one worker.
    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (*EARLY_SIGNALS, *((signal.SIGTERM,) if "SLURM_JOB_ID" in os.environ else ())):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
