"""What both sides of the socket share: keys, messages, dtypes and the layout of the arena; no torch."""
