"""The upload of a run to an object store: sealed shards first, the manifest last."""
