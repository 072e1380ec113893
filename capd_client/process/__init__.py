"""The process in which capd is a guest: its log, signals, compiler marks, ranks and memory."""
