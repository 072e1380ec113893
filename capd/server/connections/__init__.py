"""One thread for each peer."""
