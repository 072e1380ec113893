"""The in-flight queue: every capture from its offer to its acknowledgement, counted exactly."""
