"""ragged_all_to_all."""
