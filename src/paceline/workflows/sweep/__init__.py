"""Small runs that tell how large a model to train: designed, run, resumed, handed to a fit."""
