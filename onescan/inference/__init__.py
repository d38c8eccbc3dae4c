"""Use trained models: load them, classify images and texts, generate and complete text."""
