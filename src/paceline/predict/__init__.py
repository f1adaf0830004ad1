"""Step-time prediction for a calibrated machine, and backtests of the predictions."""
