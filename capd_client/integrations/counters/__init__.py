"""The step counters: where each framework counts its training steps."""
