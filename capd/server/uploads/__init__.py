"""The uploads of a daemon: every run of its root that changed goes to an object store, beside the captures."""
