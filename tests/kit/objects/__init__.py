"""A real S3 server, a proxy before it that fails as told, and the requests that obstore has no call for."""
