"""The statistics logs of nvdlfw-inspect, read into a run as scalars."""
