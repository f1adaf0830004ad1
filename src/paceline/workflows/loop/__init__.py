"""The closed loop: a budget of FLOPs becomes a trained model, beside what was predicted of it."""
