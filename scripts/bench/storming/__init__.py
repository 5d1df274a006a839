"""The parts of `quality.py`: its rows, its finished runs, its figures and its report."""
