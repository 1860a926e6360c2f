"""Post-hoc calibrators: layers from logits to logits, fitted on held-out data."""
