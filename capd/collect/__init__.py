"""The logic of collection runs without processes or daemons: the request, the progress and the report."""
