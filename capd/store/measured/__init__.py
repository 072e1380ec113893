"""The rows with errors of formats: found by the records that they are of."""
