"""Memory of a training step: model states, activations, gradients, to the byte."""
