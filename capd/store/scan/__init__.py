"""The readers of a run's files without their catalog. They change nothing."""
