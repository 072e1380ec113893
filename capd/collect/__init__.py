"""Collection runs: what they are asked for, how far they are, and what they end in; without processes or daemons."""
