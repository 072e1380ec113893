"""The rank's shared memory and its slots."""
