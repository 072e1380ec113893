"""The client thread and its conversation with the daemon."""
