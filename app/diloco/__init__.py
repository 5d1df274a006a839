"""The algorithm alone: pure functions and one state machine. Imports torch and numpy, nothing of Ray."""
