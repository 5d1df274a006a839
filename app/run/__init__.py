"""A run's folder, event tape, summary, journal, tracking and terminal."""
