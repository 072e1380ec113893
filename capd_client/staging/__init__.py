"""The staging of a tensor: it is described, then the training thread copies it once into the arena."""
