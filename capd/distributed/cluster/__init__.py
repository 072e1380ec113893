"""Runs tasks with Dask: opens a cluster, checks its workers, feeds it, and merges the results there."""
