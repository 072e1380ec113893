"""Taps inside compiled graphs; knows no hook."""
