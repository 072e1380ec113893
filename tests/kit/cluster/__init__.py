"""Runs with many series for tasks, and Dask schedulers and workers as users start them."""
