"""The lab of a daemon: hands sampled records to a process of low priority, and stores the errors it measures."""
