"""The command `capd compare`."""
