"""The closed loop: turns a FLOP budget into a trained model, and checks its predictions."""
