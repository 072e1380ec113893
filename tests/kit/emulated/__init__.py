"""Models and reference results of the emulation tests."""
