"""Files of other tools: the registry of the tools, and what their exports and imports share."""
