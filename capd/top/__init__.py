"""The screen of `capd top`: a live view of one node in a terminal."""
