"""Independent oracles for the number formats."""
