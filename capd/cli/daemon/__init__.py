"""The commands about a daemon: serve, ctl, config and doctor."""
