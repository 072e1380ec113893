"""`watch(model)` and `plan(model)`: find the products of a model and put taps on them."""
