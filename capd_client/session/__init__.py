"""The one session of a process, and the daemon that it may start for itself."""
