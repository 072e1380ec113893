"""The products of captured linear layers: the records of one call, and the error of each format on them."""
