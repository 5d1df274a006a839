"""Runs as Ray jobs: what is submitted, which job is meant, its log and how it ended. `app.submit` is the command."""
