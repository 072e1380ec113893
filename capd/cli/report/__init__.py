"""The commands `capd report` and `capd plot`."""
