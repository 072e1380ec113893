"""Repairs of `capd verify`: a new run of what reads, a new catalog, a dead node taken over."""
