"""The sockets of the daemon and the frames on them."""
