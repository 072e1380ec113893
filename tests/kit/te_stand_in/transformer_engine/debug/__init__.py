"""See transformer_engine."""
