"""Text models: embeddings and positions in, tokens out; and the configs that transformers has no classes for."""
