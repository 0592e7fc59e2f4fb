"""From files and arrays to patch rows: decoding, and how each family cuts a picture. Knows nothing of models."""
