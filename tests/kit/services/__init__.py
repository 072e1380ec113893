"""What stands above a daemon: a service manager's sockets, and a Slurm of the test's own."""
