"""Imported by a worker before its program, which then need not call :func:`shared_core.install`."""

from shared_core.job import prepare_groups

prepare_groups()
