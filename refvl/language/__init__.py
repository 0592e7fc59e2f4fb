"""Text models, from embeddings and positions to tokens, and configs for which transformers has no classes."""
