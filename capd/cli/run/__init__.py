"""`capd run`, `capd plan` and collection runs."""
