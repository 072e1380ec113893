"""Records wherever they are: in a store, in files, in pairs."""
