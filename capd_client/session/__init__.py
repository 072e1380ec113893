"""The one session of a process, and the daemon that a job may start for itself."""
