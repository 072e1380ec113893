"""Files of other tools, for the tests of the exchange."""
