"""Files that models are loaded from, and how a loaded model is told from another."""
