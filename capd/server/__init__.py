"""The daemon: its life and its limits."""
