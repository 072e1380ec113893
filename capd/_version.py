"""The version of capd, defined only here."""

__version__ = "0.1.0"
