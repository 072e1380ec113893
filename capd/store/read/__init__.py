"""The read API: stores, series, records and regions."""
