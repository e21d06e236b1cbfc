"""Test tools that users may use too: digests of training state, runs on machines of their own, and the soak test.

They import the product; nothing of the product imports them.
"""
