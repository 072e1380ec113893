"""Sockets and the frames on them."""
