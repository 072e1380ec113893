"""The copies of runs: one run copied whole or in part, or several merged into one. Sources are only read."""
