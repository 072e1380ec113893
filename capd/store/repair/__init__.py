"""The repairs of `capd verify`: a new run of all readable records, a new catalog, the takeover of a dead node."""
