"""Jobs that the soak test trains. They may import Lightning, unlike the rest of the core; nothing imports them."""
