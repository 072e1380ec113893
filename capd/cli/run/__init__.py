"""The commands that start a job: `capd run`, `capd plan` and collection runs."""
