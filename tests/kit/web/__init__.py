"""Processes of `capd web`, and requests to them as a browser sends them."""
