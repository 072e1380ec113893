"""What the flight recorder leaves in a run: the keeps and their file, and the files of its spool."""
