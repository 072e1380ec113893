"""The runs of a daemon, and which ranks may join them."""
