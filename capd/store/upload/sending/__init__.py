"""How objects go up: threads, bandwidth and memory, the request to stop, and what servers enforce and leave unfinished."""
