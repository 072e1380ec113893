"""The products of captured calls: what their records hold, found among all records of a store."""
