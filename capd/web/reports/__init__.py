"""The report of a finished run: its own process makes it, the page keeps it for a while, and a sandbox shows it."""
