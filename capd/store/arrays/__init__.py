"""Records as arrays: regions by numpy's indexing, lazy arrays, and arrays with named axes."""
