"""The connections of the daemon: one thread for each peer."""
