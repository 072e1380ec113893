"""Object stores: addresses such as s3://bucket/prefix, and their objects, read and written through obstore."""
