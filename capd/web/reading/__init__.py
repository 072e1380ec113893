"""What the page reads: a bounded number of catalog rows for each answer, and the numbers made of them."""
