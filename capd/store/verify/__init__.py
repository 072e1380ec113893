"""The checks of `capd verify`. They change nothing in the run."""
