"""Makes a node's part of a run consistent when a daemon starts."""
