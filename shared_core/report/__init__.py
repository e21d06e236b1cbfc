"""What happened in a job, from its events."""

from shared_core.report.history import History, history_of
from shared_core.report.metrics import read_curve
from shared_core.report.page import to_page
from shared_core.report.timeline import Failure, Recovery, format_recoveries, format_timeline, recoveries
from shared_core.report.trace import to_trace

__all__ = [
    "History",
    "Failure",
    "Recovery",
    "format_recoveries",
    "format_timeline",
    "history_of",
    "read_curve",
    "recoveries",
    "to_page",
    "to_trace",
]
