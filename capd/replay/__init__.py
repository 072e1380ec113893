"""The replay of products: Y, dX and dW of captured linear calls under named recipes, and their errors."""
