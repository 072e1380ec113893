"""The metrics of papers over the steps of a run: measured record by record, in groups, as JSON and rows."""
