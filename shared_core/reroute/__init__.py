"""Re-routing: the micro-batches of a lost worker are computed by its data-parallel peers (ReCycle, arXiv 2405.14009).

Nothing is imported here: planning needs Python alone, so ``swiftctl plan`` runs where neither torch nor OR-tools is.
"""
