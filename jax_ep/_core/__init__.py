"""What every op stands on: checks, libraries and groups. It knows no op."""
