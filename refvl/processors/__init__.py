"""From words and pixels to token ids: one file per family, and shared code in `chat`."""
