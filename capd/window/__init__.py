"""The settings of the flight recorder, the place that its spool needs, and the seam through which others ask it."""
