"""The commands about what is stored: ls, show, stats, verify, export and import."""
