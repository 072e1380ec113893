"""The process that capd is a guest in: its log, signals, compiler marks, ranks and memory."""
