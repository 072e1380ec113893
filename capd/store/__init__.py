"""The store on disk: its format, its writer and its readers; no torch."""
