"""The commands that watch a job while it runs."""
