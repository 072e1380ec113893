"""What users read: stores, series, records and regions."""
