"""Access to records wherever they are: in a store, in files, in pairs."""
