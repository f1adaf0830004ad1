"""Tables, plots and documents from records. Nothing here runs a measurement."""
