"""The shard files and small-record logs of a node while they are written."""
