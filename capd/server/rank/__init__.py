"""What the daemon knows of one rank."""
