"""The commands about whole runs: runs, du, rm, prune, tag, pin, unpin and gc."""
