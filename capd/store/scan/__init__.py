"""What the files of a run say; changes nothing."""
