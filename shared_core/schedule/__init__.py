"""Schedules of pipelines as data: planned, timed, checked and drawn by pure functions. Needs Python alone."""
