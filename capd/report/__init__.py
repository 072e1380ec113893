"""What a run, or a directory of tensor files, comes to: statistics as JSON and as text, and pages of figures."""
