"""Analysis in tasks: any engine may run them, and Dask runs them for the command line."""
