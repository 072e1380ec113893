"""The figure of a replay of products."""
