"""The `.pt` files of tensor_saver: read, written, imported and exported."""
