"""The page of `capd web`: a reader process that shows runs in a browser, live and finished."""
