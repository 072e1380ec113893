"""The plan of a job: the captures that it would make, shown by `capd plan -- CMD` and `capd_client.plan(model)`.

A plan takes the place of a session. It describes each offered tensor exactly as a session would, and keeps only the
description (`session`). Each rank writes a small document with its offers (`seen`). `figures` computes the
numbers from the documents of all ranks, and `text` prints the result. `seen`, `figures` and `text` need no torch.
"""
