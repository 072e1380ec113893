"""What TransformerEngine, which needs a GPU, looks like to capd: names, signatures and calls of its 2.20."""
