"""Pipelines: which messages are logged (``grouping``, pure functions of plain data).

Nothing is imported here: ``swiftctl`` plans where neither torch nor DeepSpeed is installed.
"""
