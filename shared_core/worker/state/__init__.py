"""Replicated and rank-local state: what is published, updated, undone, and put back in a replacement."""
