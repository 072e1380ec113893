"""Counts of the scales and bit patterns in the blocks of a 16-bit tensor, from which the errors of formats follow."""
