"""Commands: each file is one, and a Prefect flow."""
