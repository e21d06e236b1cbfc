"""Recovery for Hugging Face Accelerate comes with the next version; nothing is exported yet."""

__all__: list[str] = []
