"""Stage: one version behind HTTP, in processes that share its tables."""
