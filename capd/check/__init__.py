"""The check of captured products against their own operands: bounds, residuals, and the factor that fits."""
