"""Benchmarks: ``python -m benchmarks.NAME --json FILE [--quick]`` prints a table and writes rows of one form."""
