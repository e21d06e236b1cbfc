"""Fuzzers of every format and frame that the product reads: ``python -m tests.fuzz``; see CONTRIBUTING.md."""
