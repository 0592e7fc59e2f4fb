"""Tools built on the pipeline: the command line, the GPU checks, the demo."""
