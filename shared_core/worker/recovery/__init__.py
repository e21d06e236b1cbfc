"""What is done after a failure: a generation is formed, state is transferred, newcomers take their places."""
