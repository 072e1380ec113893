"""The verdict on number formats: the numbers by kind of tensor, the best format, the worst tensors, and sentences."""
