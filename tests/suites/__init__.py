"""Suites of tests of others, run over this product."""
