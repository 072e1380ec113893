"""The rules of `[[trigger]]` in the daemon: a thread that judges committed records and ranks, and reports alerts."""
