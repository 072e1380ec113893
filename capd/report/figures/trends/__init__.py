"""The figures of metrics over the steps of a run."""
