"""Dumps of mindstudio-probe (msprobe): written from records, and read into runs."""
