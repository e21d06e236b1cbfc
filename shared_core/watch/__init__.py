"""A job while it runs: one view of it, as text, on a screen, as a web page and as metrics."""
