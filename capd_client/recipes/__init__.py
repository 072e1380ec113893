"""The recipes of a linear layer's three products: the format of each of their six operands, as data. No torch."""
