"""The lifecycle of stored runs: what there is, what a policy keeps, the removal, the trash."""
