"""Taps inside compiled graphs. This package imports no hooks."""
