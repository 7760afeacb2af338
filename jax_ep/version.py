"""The version, and the one number by which the Python code and the compiled libraries recognise each other."""

__version__ = "0.1.0"
