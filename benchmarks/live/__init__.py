"""Benchmarks of the live views."""
