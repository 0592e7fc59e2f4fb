"""From words and pixels to token ids: one file per family, and the shared code in `chat`."""
