"""The command `capd check`."""
