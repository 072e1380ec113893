"""The alerts of a run: what rules said while it was captured, one JSON object a line for each node."""
