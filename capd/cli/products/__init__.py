"""The captured products of a run, as several commands find and replay them."""
