"""The report as one page for a browser: its data, and how that is put together with its assets."""
