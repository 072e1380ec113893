"""Models that several folders of tests train."""
