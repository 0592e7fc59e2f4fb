"""From files and arrays to patch rows: decoding, and each family's way of cutting images.

This package imports no model code.
"""
