"""The parts of `storm.py`: its runs, their figures and the picture."""
