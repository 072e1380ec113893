"""Tasks of whole shards, and their partial results, which merge into what one pass finds, to the byte."""
