"""The protocol that both sides of the socket share: keys, messages, dtypes and the arena's layout. No torch."""
