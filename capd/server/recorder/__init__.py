"""The flight recorder: holds the tensors of the last iterations in a bounded spool, and keeps or expires them."""
