"""Runs in object stores, read in place: manifests, segments and shards, each as far as a reader asks for it."""
