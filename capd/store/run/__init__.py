"""The writer of one run on one node."""
