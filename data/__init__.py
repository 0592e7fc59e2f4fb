"""What the project ships besides code: media, the tiny checkpoint, and the scripts that made it."""
