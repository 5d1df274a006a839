"""Decoupled DiLoCo: the algorithm, one learner's work, the run folder and the entry points."""
