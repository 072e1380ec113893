"""Jobs of one rank that several folders of tests start."""
