"""The msgpack form of analysed values."""
