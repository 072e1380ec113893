"""The metrics of the daemon: one snapshot a second, as a page over HTTP and as a file for node_exporter."""
