"""`watch(model)`, and what it puts on a model."""
