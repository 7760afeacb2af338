"""dispatch and combine."""
