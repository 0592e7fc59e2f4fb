"""What stands on the pipeline: the command line, costs before loading, a folder of embeddings, the demo."""
