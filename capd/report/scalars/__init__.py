"""The scalars of runs in reports and comparisons: their lines over the iterations, and their differences."""
