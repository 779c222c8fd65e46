"""Moving weights on CPU, beside what the same machine does without us in the same run."""
