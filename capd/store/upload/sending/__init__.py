"""How objects go up: threads, bandwidth, memory, the request to stop, and what servers enforce or leave unfinished."""
