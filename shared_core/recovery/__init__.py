"""What is done after a failure: publications, state transfer, and the forming of a generation."""
