"""The scripts behind the small models: scenes and pages, training, evaluation. Run them from the repository."""
