"""The settings of a rank: environment, then capd.toml, then default."""
