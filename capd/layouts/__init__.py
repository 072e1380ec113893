"""The comparison of whole tensors of two runs whose layouts differ, with limits from rounding."""
