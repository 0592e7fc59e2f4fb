"""From files and arrays to patch rows: decoding, and the methods by which each family cuts images.

Imports no model code.
"""
