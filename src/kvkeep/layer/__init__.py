"""One layer's cache: what it holds, and the step that changes it."""
