"""From words and pixels to token ids: one file per family, and what all share in `chat`."""
