"""The Triton kernels of statistics rows, and the process that compiles them in advance. No module imports torch.

`kernels` imports Triton, which takes a second. `artifacts` and `compile` only check whether Triton is installed.
`capd_client.devstats` launches the kernels.
"""
