"""Checks of a run; changes nothing."""
