"""What is done after a failure: a generation is formed, state is transferred, replacements take their places."""
