"""What ops are written with: checks, FFI calls, linear maps, float8 values. Knows neither ops nor groups."""
