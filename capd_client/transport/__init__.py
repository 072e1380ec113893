"""The client thread of a rank, and its conversation with the daemon."""
