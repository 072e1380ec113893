"""A CPU that stands in for a GPU."""
