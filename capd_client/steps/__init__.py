"""The time of a capture: iteration, micro-batch, activation checkpointing, and the orders of `capd ctl`."""
