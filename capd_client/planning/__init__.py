"""The plan of a job: what it would capture, shown by `capd plan -- CMD` and `capd_client.plan(model)`.

A plan stands where a session does, describes each tensor that it is offered as a session would, and keeps only that
(`sink`, `session`). What a rank has seen is a small document (`seen`); `figures` does the arithmetic on the documents
of all ranks, `text` prints the result. `seen`, `figures` and `text` need no torch.
"""
