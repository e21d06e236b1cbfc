"""Values that JSON can hold."""

from __future__ import annotations

from hypothesis import strategies as st

text_keys = st.text(max_size=6)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text_keys, inner, max_size=3),
    max_leaves=6,
)
