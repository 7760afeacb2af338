"""Matrix products with a collective."""
