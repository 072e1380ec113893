"""The commands about stored records: ls, show, stats, verify, export and import."""
