"""One learner's work: data, model, inner loop, evaluation, export. No Ray."""
