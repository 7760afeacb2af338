"""The ops, a folder for each family."""
