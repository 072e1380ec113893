"""The numbers of a report about runs or tensor files: as JSON, as text, and as pages of figures."""
