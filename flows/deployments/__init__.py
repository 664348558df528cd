"""What runs on a Prefect server, when, and how people and workers find it."""
