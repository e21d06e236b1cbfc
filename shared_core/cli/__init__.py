"""Console scripts: ``swiftrun`` (launcher with torchrun's flags) and ``swiftctl``."""
