"""Transforms that spread outliers over a block before it is quantised."""
