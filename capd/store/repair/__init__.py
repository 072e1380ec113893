"""Repairs for `capd verify`."""
