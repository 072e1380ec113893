"""The parts of a job that `capd run` and `capd plan` share."""
