"""The ways in which bytes reach the disk."""
