"""The runs of a daemon, and the ranks that may join them."""
