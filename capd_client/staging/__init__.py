"""The training thread's one copy of a tensor into the arena."""
