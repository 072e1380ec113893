"""The verb that uploads runs to an object store."""
