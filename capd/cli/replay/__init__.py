"""The command `capd replay`."""
