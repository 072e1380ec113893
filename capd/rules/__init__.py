"""The language of `[[trigger]]`: conditions over stored statistics and scalars, and the judge that applies them."""
