"""The service manager or scheduler above the daemon: its sockets, its watchdog and its time limits."""
