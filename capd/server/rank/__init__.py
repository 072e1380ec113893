"""The daemon's knowledge of one rank."""
