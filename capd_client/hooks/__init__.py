"""Taps on modules and functions."""
