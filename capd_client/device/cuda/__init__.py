"""CUDA on the other side of the device's seam: streams, events, copies and page locks."""
