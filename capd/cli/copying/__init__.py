"""The commands that copy runs: `capd cp` and `capd merge`."""
