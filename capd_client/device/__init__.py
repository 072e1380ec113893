"""The way of a tensor from an accelerator into the arena."""
