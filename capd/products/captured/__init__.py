"""The tensors of each captured product, found among records without elements."""
