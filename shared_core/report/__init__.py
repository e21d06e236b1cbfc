"""What happened in a job, from its events."""

from shared_core.report.timeline import Loss, Recovery, format_recoveries, format_timeline, recoveries

__all__ = ["Loss", "Recovery", "format_recoveries", "format_timeline", "recoveries"]
