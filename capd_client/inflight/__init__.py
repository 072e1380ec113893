"""Every capture from offer to acknowledgement, counted exactly."""
