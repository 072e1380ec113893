"""The arena of a rank: its shared memory, divided into slots."""
