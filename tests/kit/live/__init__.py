"""Daemons and terminals for the tests of live views."""
