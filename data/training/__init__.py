"""How the small models were made: scenes and pages, training, evaluation. Run the scripts from the repository."""
