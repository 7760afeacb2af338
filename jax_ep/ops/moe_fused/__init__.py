"""dispatch with the product behind it, combine with the product before it."""
