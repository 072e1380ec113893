"""What `capd run` and `capd plan` need of a job."""
