"""When a capture happens: iteration, micro-batch, activation checkpointing, and what `capd ctl` asks for."""
