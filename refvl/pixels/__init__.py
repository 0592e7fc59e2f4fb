"""From files and arrays to patch rows: decoding, and how each family cuts an image. Imports nothing from models."""
