"""Benchmarks: ``python -m benchmarks.NAME [--quick | --full] [--json FILE]`` prints a table and writes its rows."""
