"""Scalars: single numbers of a step, such as its loss, recorded beside the tensors."""
