"""sparse_all_reduce and coalesce."""
