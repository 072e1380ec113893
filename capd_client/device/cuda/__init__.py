"""The CUDA implementation of the device's seam: streams, events, copies and page locks."""
