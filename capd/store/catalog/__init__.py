"""The SQLite catalog of a node, derived from the frames."""
