"""The Python runtime around copies: the interpreter's switch interval, garbage collection, the driver lock."""
