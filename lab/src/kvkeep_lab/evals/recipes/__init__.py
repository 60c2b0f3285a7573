"""How the prompts of each benchmark's kinds of tasks are made here, without a download."""
