"""The Triton kernels of statistics rows, and the process that compiles them ahead. No module here imports torch.

`kernels` imports Triton, which takes a second; `artifacts` and `compile` only look whether it is there. What launches
the kernels: `capd_client.devstats`.
"""
