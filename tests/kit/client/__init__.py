"""Stand-ins for what a client meets: a daemon, devices, CUDA, models and sinks."""
