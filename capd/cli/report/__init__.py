"""The commands `capd report`, `capd plot` and `capd metrics`."""
