"""Hydra configuration groups. The schema and every default live in `app.config`."""
