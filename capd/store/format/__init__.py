"""The bytes on disk, as pure functions: frames, chunks, codecs and statistics."""
