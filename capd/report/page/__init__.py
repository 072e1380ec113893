"""The report as one page for a browser: its data, and the file that joins data and assets."""
