"""Export, import and loading of models, in a single process."""
