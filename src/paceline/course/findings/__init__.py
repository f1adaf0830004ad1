"""What the measured figures mean, question by question."""
