"""The speed of distributed analysis, measured on this machine and predicted for clusters."""
