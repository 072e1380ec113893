"""The pipeline of a record, from its descriptor to its commit."""
